from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.config.settings import SettingsError
from lockstep.envs.convert import ObservationWriter
from lockstep.models import (
    MLP,
    ImpalaResNet,
    NatureCNN,
    ObservationEncoder,
    ObservationLayout,
    QModelConfig,
    SimpleConvNet,
    StandardModelConfig,
)
from lockstep.models.encoders import IMAGE_ENCODERS, ConvNet, DopamineCNN, ImageEncoder, MinAtarCNN, SymbolNet
from lockstep.models.layers import (
    Initialization,
    PixelConv2d,
    fold_kernel,
    fold_pixels,
    initialize_lecun_normal,
    reproducible_initialization,
)
from lockstep.models.observations import precision_warning, unused_mask
from lockstep.models.resnet import FixupBlock
from lockstep.models.trunk import EncoderName


def networks(initialization: Initialization) -> tuple[nn.Module, ...]:
    with reproducible_initialization(0):
        resnet = ImpalaResNet((3, 12, 12), (16, 64), 256, initialization)
        return ConvNet((4, 36, 36), ((64, 8, 4),), 512, "relu", initialization), resnet


def pixels(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(4, 84, 84), (1, 84, 84), (3, 96, 80), (4, 86, 84), (2, 61, 47)])
def test_pixel_convolution_equals_an_ordinary_one(shape: tuple[int, int, int]) -> None:
    layer = PixelConv2d(shape[0], 32, 8, stride=4).double()
    image = pixels(3, *shape)
    expected = F.conv2d(image.double() / 255, layer.weight, layer.bias, 4)
    (gradient,) = torch.autograd.grad(expected.square().sum(), layer.weight)
    output = layer(image, torch.float64)
    output.square().sum().backward()
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer.weight.grad, gradient, rtol=1e-12, atol=1e-12)
    assert output.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("block", [2, 4, 8])
def test_folding_moves_each_pixel_to_its_place(block: int) -> None:
    image = pixels(2, 3, 2 * block, 3 * block)
    folded = fold_pixels(image, block)
    assert torch.equal(folded, F.pixel_unshuffle(image.float(), block).byte())
    kernel = torch.randn(5, 3, 2 * block, block)
    assert torch.equal(fold_kernel(kernel, block), F.pixel_unshuffle(kernel, block))


def test_folding_takes_any_memory_layout() -> None:
    image = pixels(2, 1, 20, 24)
    for view in (image[:, :, 3:19, 2:22], image.transpose(2, 3)[:, :, :, :16], image[1:]):
        assert torch.equal(fold_pixels(view, 4), F.pixel_unshuffle(view.float(), 4).byte())


def test_pixels_get_no_gradient() -> None:
    output = PixelConv2d(4, 32, 8, stride=4)(pixels(2, 4, 84, 84))
    assert output.grad_fn is not None
    assert output.grad_fn.next_functions[0][0] is None, "backward would compute a gradient for the image"


@pytest.mark.parametrize(
    ("network", "activation", "shape", "dense_inputs"),
    [
        (NatureCNN, F.relu, (4, 84, 84), 64 * 7 * 7),
        (SimpleConvNet, F.elu, (3, 72, 128), 128 * 3 * 6),
        (MinAtarCNN, F.relu, (6, 10, 10), 16 * 8 * 8),
    ],
)
def test_convolutional_networks_equal_plain_layers(
    network: ImageEncoder, activation: Callable[[Tensor], Tensor], shape: tuple[int, int, int], dense_inputs: int
) -> None:
    ours = network(shape)
    strides = {NatureCNN: (4, 2, 1), SimpleConvNet: (4, 2, 2), MinAtarCNN: (1,)}[network]
    image = pixels(3, *shape)
    x = image.float() / 255
    for layer, stride in zip(ours.convolutions, strides, strict=True):
        assert isinstance(layer, nn.Conv2d)
        x = activation(F.conv2d(x, layer.weight, layer.bias, stride))
    x = x.permute(0, 2, 3, 1).reshape(3, dense_inputs)
    assert ours.dense is not None
    expected = activation(F.linear(x, ours.dense.weight, ours.dense.bias))
    torch.testing.assert_close(ours(image, torch.float32), expected, rtol=1e-4, atol=1e-5)
    assert ours.out_features == expected.shape[1] == (128 if network is MinAtarCNN else 512)


@pytest.mark.parametrize(
    ("shape", "zeros", "dense_inputs"),
    [
        ((4, 84, 84), ((2, 2, 2, 2), (1, 2, 1, 2), (1, 1, 1, 1)), 11 * 11 * 64),
        ((1, 5, 10), ((3, 3, 3, 4), (1, 2, 1, 1), (1, 1, 1, 1)), 1 * 2 * 64),
    ],
)
def test_padded_convolutions_make_images_smaller_by_their_strides_alone(
    shape: tuple[int, int, int], zeros: tuple[tuple[int, ...], ...], dense_inputs: int
) -> None:
    """84 -> 21 -> 11 -> 11; (10, 5) -> (3, 2) -> (2, 1) -> (2, 1)."""
    ours = DopamineCNN(shape)
    image = pixels(3, *shape)
    x = image.float() / 255
    for layer, stride, around in zip(ours.convolutions, (4, 2, 1), zeros, strict=True):
        assert isinstance(layer, nn.Conv2d)
        x = F.relu(F.conv2d(F.pad(x, around), layer.weight, layer.bias, stride))
    x = x.permute(0, 2, 3, 1).reshape(3, dense_inputs)
    assert ours.dense is not None
    expected = F.relu(F.linear(x, ours.dense.weight, ours.dense.bias))
    torch.testing.assert_close(ours(image, torch.float32), expected, rtol=1e-4, atol=1e-5)
    assert DopamineCNN.smallest == 1


def test_every_network_of_the_table_is_a_choice_and_no_other() -> None:
    assert {"auto", "mlp", "impala", "symbols", *IMAGE_ENCODERS} == set(get_args(EncoderName))
    assert len({"auto", "mlp", "impala", "symbols", *IMAGE_ENCODERS}) == 4 + len(IMAGE_ENCODERS)


def test_impala_equals_plain_functions() -> None:
    network = ImpalaResNet((3, 21, 16), channels=(4, 8))
    image = pixels(2, 3, 21, 16)

    def convolve(layer: nn.Module, x: Tensor) -> Tensor:
        weight, bias = layer.weight, layer.bias
        assert isinstance(weight, Tensor) and isinstance(bias, Tensor)
        return F.conv2d(x, weight, bias, padding=1)

    x = image.float() / 255
    for convolution, blocks in zip(network.convolutions, network.blocks, strict=True):
        x = F.max_pool2d(convolve(convolution, x), 3, 2, padding=1)
        for block in blocks:  # type: ignore[attr-defined]
            x = x + convolve(block.second, F.relu(convolve(block.first, F.relu(x))))
    assert x.shape == (2, 8, 6, 4)
    x = F.relu(x).permute(0, 2, 3, 1).reshape(2, -1)
    expected = F.relu(F.linear(x, network.dense.weight, network.dense.bias))
    torch.testing.assert_close(network(image, torch.float32), expected, rtol=1e-4, atol=1e-5)


def test_mlp_by_hand() -> None:
    network = MLP(2, (1, 1), "relu")
    for layer, weight in zip(network.layers, ([[1.0, -2.0]], [[3.0]]), strict=True):
        layer.weight.data = torch.tensor(weight)  # type: ignore[union-attr]
    assert network(torch.tensor([[5.0, 1.0], [1.0, 1.0]])).tolist() == [[9.0], [0.0]]


def test_orthogonal_initialization() -> None:
    network = NatureCNN((4, 84, 84))
    for layer in (*network.convolutions, network.dense):
        weight, bias = layer.weight.flatten(1), layer.bias  # type: ignore[union-attr,operator]
        torch.testing.assert_close(weight @ weight.T, 2 * torch.eye(len(weight)), rtol=1e-4, atol=1e-4)
        assert not bias.any()  # type: ignore[union-attr,operator]


def test_lecun_normal_initialization() -> None:
    layer = nn.Conv2d(64, 256, 3)
    with reproducible_initialization(0):
        initialize_lecun_normal(layer)
    std = 1 / math.sqrt(64 * 9)
    assert layer.weight.std().item() == pytest.approx(std, rel=0.01)
    assert layer.weight.mean().item() == pytest.approx(0, abs=std / 100)
    assert layer.weight.abs().max().item() == pytest.approx(2 * std / 0.8796, rel=0.001)
    assert layer.bias is not None and not layer.bias.any()


@pytest.mark.parametrize("network", networks("pytorch"))
def test_pytorch_initialization_is_uniform_up_to_one_over_the_root_of_the_inputs(network: nn.Module) -> None:
    layers = [layer for layer in network.modules() if isinstance(layer, (nn.Conv2d, nn.Linear))]
    assert len(layers) >= 2
    for layer in layers:
        limit = 1 / math.sqrt(layer.weight[0].numel())
        assert layer.weight.std().item() == pytest.approx(limit / math.sqrt(3), rel=0.05)
        assert 0.95 * limit < layer.weight.abs().max().item() <= limit
        assert layer.bias is not None and 0 < layer.bias.abs().max().item() <= limit


@pytest.mark.parametrize("network", networks("glorot"))
def test_glorot_initialization_is_uniform_with_a_variance_of_two_over_inputs_and_outputs(network: nn.Module) -> None:
    layers = [layer for layer in network.modules() if isinstance(layer, (nn.Conv2d, nn.Linear))]
    assert len(layers) >= 2
    for layer in layers:
        places = layer.weight[0, 0].numel() if isinstance(layer, nn.Conv2d) else 1
        variance = 2 / (places * (layer.weight.shape[0] + layer.weight.shape[1]))
        limit = math.sqrt(3 * variance)
        assert layer.weight.var().item() == pytest.approx(variance, rel=0.1)
        assert 0.95 * limit < layer.weight.abs().max().item() <= limit
        assert layer.bias is not None and not layer.bias.any()


def test_a_dense_size_of_minus_one_leaves_out_the_dense_layer() -> None:
    space = spaces.Box(0, 255, (4, 84, 84), np.uint8)
    cases: list[tuple[Any, int]] = [("nature", 3136), ("dopamine", 7744), ("der", 576)]
    for encoder, features in cases:
        config = QModelConfig(encoder=encoder, dense_size=-1)
        network: Any = config.build_encoder(space, dtype=torch.float32, normalize=False, clip=10.0)
        assert network.images[0].dense is None and network.out_features == features
    with pytest.raises(SettingsError, match="take the encoder impala, which has one"):
        QModelConfig(encoder="impala", dense_size=-1).build_encoder(
            space, dtype=torch.float32, normalize=False, clip=10.0
        )


@pytest.mark.parametrize("returns", ["expected", "implicit"])
def test_glorot_initialization_reaches_the_head_of_a_q_network(returns: Literal["expected", "implicit"]) -> None:
    config = QModelConfig(encoder="minatar", initialization="glorot", stream_size=99, returns=returns)
    space = spaces.Box(0, 255, (4, 10, 10), np.uint8)
    model = config.build(space, spaces.Discrete(7), precision="fp32", normalize_observations=False, seed=1)
    layers = [layer for layer in model.head.modules() if isinstance(layer, nn.Linear)]
    assert len(layers) == (2 if returns == "expected" else 3)
    for layer in layers:
        assert layer.weight.var().item() == pytest.approx(2 / sum(layer.weight.shape), rel=0.1)
        assert not layer.bias.any()


def test_fixup_begins_every_residual_block_as_the_identity() -> None:
    with reproducible_initialization(0):
        network = ImpalaResNet((3, 12, 12), (16, 64), 5, "fixup")
    x = torch.randn(2, 64, 3, 3, generator=torch.Generator().manual_seed(1))
    blocks = [block for section in network.blocks for block in section]  # type: ignore[attr-defined]
    assert len(blocks) == 4 and torch.equal(blocks[-1](x), x)
    assert blocks[-1].first.weight.std().item() == pytest.approx(math.sqrt(2 / (64 * 9)) / math.sqrt(4), rel=0.02)
    weight = network.convolutions[1].weight
    assert weight.std().item() == pytest.approx(math.sqrt(2 / (16 * 9)), rel=0.03)  # type: ignore[operator]
    network(pixels(2, 3, 12, 12), torch.float32).sum().backward()
    assert all(block.second.weight.grad.abs().sum() > 0 for block in blocks), "it learns all the same"


def test_a_block_of_fixup_by_hand() -> None:
    block = FixupBlock(1, blocks=4)
    block.first.weight.data, block.second.weight.data = torch.zeros(1, 1, 3, 3), torch.zeros(1, 1, 3, 3)
    block.first.weight.data[..., 1, 1], block.second.weight.data[..., 1, 1] = 3.0, -2.0
    for parameter, value in zip((block.shift_first, block.shift_second, block.scale), (0.5, 0.25, 10.0), strict=True):
        parameter.data.fill_(value)
    # relu(1) + 0.5 = 1.5, times 3 is 4.5, plus 0.25 is 4.75, times -2 is -9.5, times 10 is -95.
    # relu(-1) + 0.5 = 0.5, times 3 is 1.5, plus 0.25 is 1.75, times -2 is -3.5, times 10 is -35.
    assert block(torch.tensor([[[[1.0, -1.0]]]])).tolist() == [[[[-94.0, -36.0]]]]


def test_dict_observations_are_encoded_in_the_order_of_their_keys() -> None:
    space = spaces.Dict(
        speed=spaces.Box(-1, 1, ()),
        camera=spaces.Box(0, 255, (3, 8, 8), np.uint8),
        action_mask=spaces.MultiBinary(4),
        arm=spaces.Box(-1, 1, (2, 2)),
    )
    layout = ObservationLayout.of(space)
    assert layout.images == (("camera", (3, 8, 8)),)
    assert layout.vectors == (("arm", 4), ("speed", 1)) and layout.vector_size == 5 and layout.mask_size == 4
    encoder = ObservationEncoder(
        layout, lambda shape: ImpalaResNet(shape, (2,), 7), lambda size: MLP(size, (3,), "tanh"), normalize=True, clip=2
    )
    assert encoder.vectors is not None and encoder.images is not None and encoder.out_features == 10
    encoder.mean.copy_(torch.tensor([0.0, 0.0, 0.0, 1.0, 5.0]))
    encoder.std.copy_(torch.tensor([1.0, 1.0, 1.0, 2.0, 0.5]))
    obs = {
        "speed": torch.full((2, 1), 5.5),
        "arm": torch.tensor([1.0, -9.0, 0.5, 2.0]).reshape(1, 1, 2, 2).expand(2, 1, 2, 2),
        "camera": pixels(2, 1, 3, 8, 8),
        "action_mask": torch.ones(2, 1, 4),
    }
    features = encoder(obs)
    assert features.shape == (2, 1, 10)
    torch.testing.assert_close(
        features[..., 7:], encoder.vectors(torch.tensor([1.0, -2.0, 0.5, 0.5, 1.0]).expand(2, 1, 5))
    )
    torch.testing.assert_close(features[:, 0, :7], encoder.images[0](obs["camera"][:, 0], torch.float32))


def test_images_may_be_flattened() -> None:
    layout = ObservationLayout.of(spaces.Box(0, 255, (1, 2, 2), np.uint8))
    encoder = ObservationEncoder(layout, None, lambda size: MLP(size, (), "tanh"))
    image = torch.tensor([[[[[0, 51], [102, 255]]]]], dtype=torch.uint8)
    torch.testing.assert_close(encoder(image), torch.tensor([[[0.0, 0.2, 0.4, 1.0]]]))


def test_symbols_are_inputs_of_their_own() -> None:
    network = SymbolNet((1, 1, 3), 3, lambda size: MLP(size, (), "tanh"))
    grid = torch.tensor([[[[0, 2, 7]]]], dtype=torch.uint8)
    assert network(grid, torch.float32).tolist() == [[1, 0, 0, 0, 0, 1, 0, 0, 1]]
    space = spaces.Box(0, 255, (3, 7, 7), np.uint8)
    encoder = StandardModelConfig(encoder="symbols", hidden_sizes=(5,)).build_encoder(
        space, dtype=torch.float32, normalize=False, clip=10.0
    )
    assert encoder(torch.zeros(2, 4, 3, 7, 7, dtype=torch.uint8)).shape == (2, 4, 5)


def test_unsupported_observations_are_named() -> None:
    with pytest.raises(SettingsError, match=r"entry 'text' is Text"):
        ObservationLayout.of(spaces.Dict(text=spaces.Text(5)))
    with pytest.raises(SettingsError, match=r"'action_mask': MultiBinary\(2\)"):
        ObservationLayout.of(spaces.Dict(action_mask=spaces.MultiBinary(2)))
    with pytest.raises(SettingsError, match=r"\(0,\), float32\) has nothing to observe\. .* constant"):
        ObservationLayout.of(spaces.Box(-1, 1, (0,)))
    with pytest.raises(SettingsError, match=r"--model\.encoder impala"):
        NatureCNN((3, 35, 84))
    with pytest.raises(SettingsError, match="at least 36x36"):
        SimpleConvNet((3, 84, 35))


@pytest.mark.parametrize("encoder", ["mlp", "minatar", "nature"])
def test_normalized_layers_by_an_independent_way(encoder: Any) -> None:
    """Every layer before its activation; a convolution's channels at each place."""
    size = 36 if encoder == "nature" else 10
    space = spaces.Box(0, 255, (2, size, size), np.uint8)
    config = QModelConfig(encoder=encoder, hidden_sizes=(6, 5), dense_size=7, activation="relu", layer_norm=True)
    with reproducible_initialization(1):
        built: Any = config.build_encoder(space, dtype=torch.float32, normalize=False, clip=10.0)
    for parameter in built.parameters():
        parameter.data.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
    image = pixels(1, 3, 2, size, size)
    x = image[0] / 255

    def normalized(x: Tensor, norm: nn.LayerNorm) -> Tensor:
        """[n, features, …] over features, then ReLU."""
        centered = x - x.mean(1, keepdim=True)
        unit = centered / (centered.square().mean(1, keepdim=True) + 1e-6).sqrt()
        gain, shift = (each.view(-1, *[1] * (x.dim() - 2)) for each in (norm.weight, norm.bias))
        return (gain * unit + shift).clamp(min=0)

    network = built.vectors if encoder == "mlp" else built.images[0]
    if encoder == "mlp":
        x = x.flatten(1)
        for layer, norm in zip(network.layers, network.norms, strict=True):
            x = normalized(F.linear(x, layer.weight, layer.bias), norm)
    else:
        for layer, norm in zip(network.convolutions, network.norms, strict=False):
            x = normalized(F.conv2d(x, layer.weight, layer.bias, layer.stride), norm)
        x = x.permute(0, 2, 3, 1).flatten(1)
        x = normalized(F.linear(x, network.dense.weight, network.dense.bias), network.norms[-1])
    assert len(network.norms) == {"mlp": 2, "minatar": 2, "nature": 4}[encoder]
    torch.testing.assert_close(built(image)[0], x, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("encoder", ["mlp", "nature", "impala", "minatar"])
@pytest.mark.parametrize("brightest", [1, 10])
def test_pixels_are_scaled_by_the_bounds_of_their_space(encoder: Any, brightest: int) -> None:
    def features(highest: int) -> Tensor:
        space = ObservationWriter(spaces.Box(0, highest, (40, 40, 3), np.uint8)).space
        config = StandardModelConfig(encoder=encoder)
        with reproducible_initialization(1):
            built = config.build_encoder(space, dtype=torch.float32, normalize=False, clip=10.0)
        pattern = pixels(1, 2, 3, 40, 40) % 2
        return built((pattern * highest).byte())

    torch.testing.assert_close(features(brightest), features(255), rtol=1e-4, atol=1e-5)
    layout = ObservationLayout.of(
        spaces.Dict(b=spaces.Box(0, 1, (1, 4, 4), np.uint8), a=spaces.Box(0, 0, (1, 4, 4), np.uint8))
    )
    assert layout.brightest == (1, 1), "in the order of images; nothing is divided by 0"


def test_an_entry_that_looks_like_a_mask_and_is_none_is_told() -> None:
    vector, bits = spaces.Box(-1, 1, (3,)), spaces.MultiBinary(4)
    for name in ("valid_actions", "inner.action_mask", "legal_moves", "available"):
        told = unused_mask(spaces.Dict({name: bits, "arm": vector}), 4)
        assert repr(name) in told and "'action_mask'" in told
    for name in ("inner.action_mask", "action_mask.0"):  # the second is a part of a Tuple
        assert unused_mask(spaces.Dict({name: bits, "arm": vector}), 7), "whatever it is"
    for harmless in (
        spaces.Dict(valid=bits, action_mask=bits),
        spaces.Dict(valid=spaces.MultiBinary(3), arm=vector),
        spaces.Dict(observation=bits),
        bits,
    ):
        assert unused_mask(harmless, 4) == ""
    assert unused_mask(spaces.Dict(valid=bits), 0) == "", "of actions that are not discrete"


@pytest.mark.parametrize(
    ("low", "high", "lost"),
    [
        ([0, 1.7e9], [1, 1.7e9 + 128], True),
        ([0, 1.7e9], [1, 1.7e9], True),
        ([-2e7, 0], [-2e7, 0], True),
        ([0, 1.7e9], [1, 1.8e9], False),
        ([0, 1e6], [1, 1e6], False),  # a constant that float32 holds
        ([1.0, 1.0], [1.0, 1.000001], False),
        ([np.nan, -np.inf], [np.nan, np.inf], False),
    ],
)
def test_numbers_too_large_for_what_they_differ_by_are_named(low: list[float], high: list[float], lost: bool) -> None:
    said = precision_warning(np.array(low, np.float32), np.array(high, np.float32))
    assert bool(said) == lost
    assert not lost or "e+09" in said or "2e+07" in said


@pytest.mark.parametrize(
    ("actions", "remedy"),
    [
        (spaces.Box(-1, 1, (2,)), "an algorithm for continuous ones"),
        (spaces.MultiDiscrete([2, 3]), "Use PPO, .* or wrap the environment"),
        (spaces.Dict(a=spaces.Discrete(2), b=spaces.Box(-1, 1, (2,))), "Use PPO, which takes actions with several"),
    ],
)
def test_a_q_network_says_which_algorithm_takes_other_actions(actions: spaces.Space[Any], remedy: str) -> None:
    with pytest.raises(SettingsError, match=f"A Q-network needs Discrete actions.* {remedy}"):
        QModelConfig().build(spaces.Box(-1, 1, (2,)), actions, precision="fp32", normalize_observations=False, seed=1)

"""Named array tuples against plain loops over their arrays."""

from __future__ import annotations

import copy
import pickle
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree

from lockstep.core.arrays import (
    ArrayTuple,
    FieldIndexError,
    StructureError,
    map_structure,
    named_leaves,
    overlap,
    read,
    to_numpy,
)
from lockstep.core.rollout import Rollout


class Inner(ArrayTuple):
    a: Any
    b: Any = None


class Step(ArrayTuple):
    obs: Any
    reward: Tensor
    inner: Inner | None
    mask: Tensor | None = None

    KIND: ClassVar[str] = "step"


def make_step(leading: tuple[int, ...] = (), *, seed: int = 0) -> Step:
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> Tensor:
        return torch.rand((*leading, *shape), generator=generator)

    obs = {"image": (rand(2, 3) * 255).to(torch.uint8), "nested": {"speed": rand().numpy()}}
    return Step(obs=obs, reward=rand(), inner=Inner(a=rand(4), b=None), mask=rand() > 0.5)


def flat(structure: Any) -> dict[str, np.ndarray]:
    return {name: torch.as_tensor(leaf).numpy().copy() for name, leaf in named_leaves(structure)}


def assert_same(x: Any, y: Any) -> None:
    x, y = flat(x), flat(y)
    assert list(x) == list(y)
    for name in x:
        assert x[name].dtype == y[name].dtype
        np.testing.assert_array_equal(x[name], y[name])


class TestConstruction:
    def test_fields_are_attributes(self) -> None:
        reward = torch.ones(3)
        step = Step(obs=torch.zeros(3, 2), reward=reward, inner=None)
        assert step.reward is reward
        assert step.mask is None
        assert step.KIND == "step"

    def test_missing_and_unknown_fields_are_named(self) -> None:
        with pytest.raises(TypeError, match=r"Step lacks .*obs, reward"):
            Step(inner=None)  # pyright: ignore[reportCallIssue]
        with pytest.raises(TypeError, match=r"Step .*rewrad; .*obs, reward, inner, mask"):
            Step(obs=1, rewrad=2)  # pyright: ignore[reportCallIssue]
        with pytest.raises(TypeError, match="no field speed"):
            make_step().replace(speed=torch.zeros(1))

    def test_order_is_that_of_the_declaration(self) -> None:
        step = Step(mask=torch.zeros(1), inner=None, reward=torch.zeros(1), obs=torch.zeros(1))
        assert [name for name, _ in step.named_leaves()] == ["obs", "reward", "mask"]

    def test_subclasses_inherit_fields(self) -> None:
        class Longer(Step):
            extra: Tensor | None

        assert Longer._fields == ("obs", "reward", "inner", "mask", "extra")
        assert Longer(obs=torch.zeros(1), reward=torch.zeros(1), inner=None, extra=None).mask is None
        with pytest.raises(TypeError, match=r"Longer lacks .*extra"):
            Longer(obs=torch.zeros(1), reward=torch.zeros(1), inner=None)  # pyright: ignore[reportCallIssue]

    def test_bad_declarations_are_refused(self) -> None:
        with pytest.raises(TypeError, match=r"map .*name of a field"):
            type("Bad", (ArrayTuple,), {"__annotations__": {"map": Tensor}})
        with pytest.raises(TypeError, match=r"Bad\.x .*None"):
            type("Bad", (ArrayTuple,), {"__annotations__": {"x": Tensor}, "x": 3})

    def test_fields_cannot_be_rebound(self) -> None:
        step = make_step()
        with pytest.raises(AttributeError, match="use replace"):
            step.reward = torch.zeros(1)  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(AttributeError, match="cannot be deleted"):
            del step.reward  # pyright: ignore[reportAttributeAccessIssue]
        new = step.replace(reward=torch.full((), 7.0))
        assert float(new.reward) == 7.0 and float(step.reward) != 7.0
        assert new.mask is step.mask

    def test_is_not_iterable(self) -> None:
        with pytest.raises(TypeError, match="not iterable"):
            list(make_step((3,)))  # pyright: ignore[reportArgumentType, reportCallIssue]

    def test_repr_tells_dtypes_and_shapes(self) -> None:
        assert repr(make_step((5,))) == (
            "Step(obs={image: torch.uint8[5, 2, 3], nested: {speed: numpy.float32[5]}}, reward=torch.float32[5], "
            "inner=Inner(a=torch.float32[5, 4], b=None), mask=torch.bool[5])"
        )

    def test_shape_is_what_all_arrays_share(self) -> None:
        assert make_step((5, 2)).shape == (5, 2)
        assert make_step().shape == ()
        x = torch.zeros(4, 3, 2)
        assert Inner(a=x, b=torch.zeros(4, 3)).shape == (4, 3)
        assert Inner(a=x, b=torch.zeros(4, 1, 2)).shape == (4,)
        assert Inner(a=x).shape == (4, 3, 2)
        assert Inner(a=None).shape == ()


# An index into [6, 3] and, in a plain form, the same for numpy.
basic_part = st.one_of(st.integers(-6, 5), st.slices(6))
rows = st.lists(st.integers(-6, 5), min_size=1, max_size=4, unique_by=lambda i: i % 6)
indices = st.one_of(
    basic_part,
    st.just(Ellipsis),
    st.tuples(basic_part, st.integers(-3, 2)),
    st.tuples(st.just(Ellipsis)),
    st.tuples(st.none(), basic_part),
    rows,
    rows.map(np.array),
    rows.map(torch.tensor),
    rows.map(lambda i: (torch.tensor(i), 1)),
    rows.map(lambda i: (slice(1, 5), torch.tensor(i) % 3)),
    st.lists(st.booleans(), min_size=6, max_size=6).map(torch.tensor),
    st.lists(st.booleans(), min_size=18, max_size=18).map(lambda m: torch.tensor(m).reshape(6, 3)),
).filter(lambda index: not _negative_step(index))


def _negative_step(index: Any) -> bool:
    """Torch has no views with negative strides."""
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, slice) and (part.step or 1) < 0 for part in parts)


def for_numpy(index: Any) -> Any:
    parts = index if isinstance(index, tuple) else (index,)
    return tuple(part.numpy() if isinstance(part, Tensor) else part for part in parts)


leaf_shapes = st.sampled_from([(), (2,), (2, 3), (0,)])
leaf_dtypes = st.sampled_from(["float32", "uint8", "bool", "int64"])


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    shape = (6, 3, *draw(leaf_shapes))
    array = (np.arange(np.prod(shape)).reshape(shape) * 7 % 101).astype(draw(leaf_dtypes))
    return torch.from_numpy(array) if draw(st.booleans()) else array


structures = st.recursive(
    st.one_of(arrays(), arrays(), st.none()),
    lambda children: st.one_of(
        st.dictionaries(st.sampled_from(["x", "y", "z"]), children, max_size=3),
        st.builds(Inner, a=children, b=children),
    ),
    max_leaves=6,
)


class TestIndexing:
    @given(structures, indices)
    @settings(max_examples=100)
    def test_read_is_a_loop_over_leaves(self, structure: Any, index: Any) -> None:
        tree = Inner(a=structure)
        result = tree[index]
        assert type(result) is Inner
        expected = {name: leaf[for_numpy(index)] for name, leaf in flat(tree).items()}
        got = flat(result)
        assert list(got) == list(expected)
        for name in got:
            np.testing.assert_array_equal(got[name], expected[name])

    def test_basic_indices_make_views(self) -> None:
        x = make_step((4,))
        x[2].reward.fill_(-1)
        x[1:3].obs["nested"]["speed"][1] = -2
        assert float(x.reward[2]) == -1
        assert x.obs["nested"]["speed"][2] == -2

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"mask": None}, "mask: expected an array, got None"),
            ({"obs": {"image": torch.zeros(2, 3)}}, r"obs: expected the keys \['image', 'nested'\], got \['image'\]"),
            ({"obs": torch.zeros(2)}, "obs: expected dict, got an array"),
            ({"inner": Inner(a=torch.zeros(4), b=torch.zeros(1))}, r"inner\.b: expected None, got an array"),
            ({"inner": {"a": torch.zeros(4), "b": None}}, "inner: expected Inner, got dict"),
            ({"reward": 0.5}, r"reward: expected an array, got something that is not an array \(float\)"),
        ],
    )
    def test_mismatches_name_the_field(self, change: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=f"^{message}"):
            map_structure(lambda x, _: x, make_step(), make_step(seed=1).replace(**change))

    @pytest.mark.parametrize("source", [0.0, None, {"a": torch.zeros(())}, torch.zeros(())])
    def test_only_the_same_type_matches(self, source: Any) -> None:
        with pytest.raises(StructureError, match=r"^expected Inner, got"):
            map_structure(lambda x, _: x, Inner(a=torch.zeros(())), source)

    def test_a_subclass_is_another_type(self) -> None:
        class Other(Inner):
            pass

        with pytest.raises(StructureError, match="expected Inner, got Other"):
            map_structure(lambda x, _: x, Inner(a=torch.zeros(())), Other(a=torch.zeros(())))

    @pytest.mark.parametrize("index", [3, (0, 0), torch.tensor([0, 3]), torch.ones(4, dtype=torch.bool)])
    def test_indices_out_of_range_name_the_field(self, index: Any) -> None:
        x = Inner(a={"long": torch.zeros(9, 2, 2), "short": torch.zeros(3)}, b=torch.zeros(9))
        with pytest.raises(FieldIndexError, match=r"^a\.(long|short): "):
            x[index]

    def test_observations_need_no_array_tuple(self) -> None:
        obs = {"image": torch.ones(3, 2), "speed": np.zeros(3)}
        assert read(obs, 1)["image"].tolist() == [1, 1] and read(obs, 1)["speed"] == 0


class TestMapping:
    def test_map_keeps_structure_and_none(self) -> None:
        x = make_step((3,))
        y = x.map(lambda leaf: leaf * 2 if leaf.dtype == torch.float32 else leaf)
        assert type(y) is Step and type(y.inner) is Inner and y.inner.b is None
        assert torch.equal(y.inner.a, x.inner.a * 2)  # pyright: ignore[reportOptionalMemberAccess]
        assert y.obs["nested"]["speed"] is x.obs["nested"]["speed"]

    def test_canonical_order_does_not_depend_on_dict_order(self) -> None:
        a, b = torch.zeros(1), torch.ones(1)
        first, second = Inner(a={"x": a, "y": b}), Inner(a={"y": b, "x": a})
        assert [n for n, _ in first.named_leaves()] == [n for n, _ in second.named_leaves()] == ["a.x", "a.y"]
        assert [id(leaf) for leaf in first.leaves()] == [id(leaf) for leaf in second.leaves()] == [id(a), id(b)]
        assert map_structure(lambda p, q: float(p - q), first.a, second.a) == {"x": 0, "y": 0}

    def test_several_structures(self) -> None:
        steps = [make_step(seed=i).map(torch.as_tensor) for i in range(3)]
        stacked = map_structure(lambda *xs: torch.stack(xs), *steps)
        for i, step in enumerate(steps):
            assert_same(stacked[i], step)

    @pytest.mark.parametrize(
        ("second", "message"),
        [
            (Inner(a={"x": torch.zeros(1)}), r"^a: expected the keys \['x', 'y'\], got \['x'\]"),
            (Inner(a={"x": torch.zeros(1), "y": None}), r"^a\.y: expected an array, got None"),
            (Inner(a={"x": torch.zeros(1), "y": torch.zeros(1)}, b=torch.zeros(1)), "^b: expected None, got an array"),
            ({"a": None, "b": None}, "^expected Inner, got dict"),
        ],
    )
    def test_several_structures_must_match(self, second: Any, message: str) -> None:
        first = Inner(a={"x": torch.zeros(1), "y": torch.zeros(1)})
        with pytest.raises(StructureError, match=message):
            map_structure(lambda x, y: x + y, first, second)

    @pytest.mark.parametrize("leaf", [1.0, [torch.zeros(1)], "text"])
    def test_other_things_are_refused_by_name(self, leaf: Any) -> None:
        x = Inner(a={"odd": leaf})
        with pytest.raises(StructureError, match=rf"^a\.odd: {type(leaf).__name__} .*array"):
            x.map(lambda x: x)
        with pytest.raises(StructureError, match=r"^a\.odd: "):
            x[0]
        with pytest.raises(StructureError, match=r"^a\.odd: "):
            map_structure(lambda x, y: x, x, x)

    def test_numpy_arrays_share_memory(self) -> None:
        x = make_step((3,))
        as_numpy = to_numpy(x)
        assert all(isinstance(leaf, np.ndarray) for leaf in as_numpy.leaves())
        as_numpy.reward[1] = -1
        as_numpy.obs["nested"]["speed"][2] = -2
        assert float(x.reward[1]) == -1
        assert x.obs["nested"]["speed"][2] == -2
        assert_same(as_numpy, x)

    def test_pytree_functions(self) -> None:
        x = make_step((3,)).map(torch.as_tensor)
        doubled = _pytree.tree_map(lambda leaf: leaf.float() * 2, x)
        assert type(doubled) is Step and doubled.inner is not None and doubled.inner.b is None
        assert_same(doubled, x.map(lambda leaf: leaf.float() * 2))
        leaves, spec = _pytree.tree_flatten(x)
        assert len(leaves) == 5
        assert_same(_pytree.tree_unflatten(leaves, spec), x)
        paths, _ = _pytree.tree_flatten_with_path(x)
        assert _pytree.keystr(paths[0][0]) == ".obs['image']"
        with pytest.raises(ValueError):
            _pytree.tree_map(lambda a, b: a, x, x.replace(mask=None))

    def test_gradients_flow(self) -> None:
        w = torch.ones(3, requires_grad=True)
        x = Inner(a=w * 2, b=w * 3)
        sum(leaf.sum() for leaf in x[torch.tensor([0, 0, 2])].leaves()).backward()  # pyright: ignore
        assert w.grad is not None and w.grad.tolist() == [10, 0, 5]


class TestOverlap:
    def test_overlapping_views(self) -> None:
        action, prev_action = overlap(torch.zeros(4, 2, dtype=torch.int64))
        assert action.shape == (3, 2) and prev_action.shape == (4, 2)
        for t in range(3):
            action[t] = 10 + t
        assert prev_action.tolist() == [[0, 0], [10, 10], [11, 11], [12, 12]]
        for t in range(1, 4):
            assert torch.equal(prev_action[t], action[t - 1])
        nested = overlap({"move": torch.zeros(4), "turn": None})
        nested.current["move"][0] = 5
        assert nested.previous["move"].tolist() == [0, 5, 0, 0] and nested.previous["turn"] is None


def _shared(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype).share_memory_()


def make_rollout(T: int, B: int) -> Rollout:
    action, prev_action = overlap(_shared((T + 1, B), torch.int64))
    number = _shared((T, B), torch.float32)
    flag = _shared((T, B), torch.bool)
    return Rollout(
        obs={"image": _shared((T + 1, B, 4), torch.uint8)},
        start=_shared((T + 1, B), torch.bool),
        action=action,
        reward=number,
        prev_action=prev_action,
        prev_reward=None,
        log_prob=number,
        value=number,
        terminated=flag,
        truncated=flag,
        valid=flag,
        core_state=_shared((B, 0), torch.float32),
    )


def _collect(rollout: Rollout) -> None:
    torch.set_num_threads(1)
    assert rollout.prev_reward is None
    for t in range(2):
        rollout.obs["image"][t] = t + 1
        rollout.action[t] = 7 + t
    rollout.to_numpy().reward[:] = 0.5


@pytest.mark.slow
class TestProcesses:
    def test_pickle_and_copy(self) -> None:
        x = make_step((3,))
        for y in (pickle.loads(pickle.dumps(x)), copy.deepcopy(x)):
            assert type(y) is Step
            assert_same(x, y)
            assert y.reward.data_ptr() != x.reward.data_ptr()
        assert copy.copy(x).reward is x.reward

    def test_errors_pickle_with_their_field(self) -> None:
        with pytest.raises(StructureError) as caught:
            map_structure(lambda x, _: x, make_step(), make_step().replace(obs={"image": torch.zeros(2, 3)}))
        error = pickle.loads(pickle.dumps(caught.value))
        assert isinstance(error, StructureError)
        assert str(error) == str(caught.value) == "obs: expected the keys ['image', 'nested'], got ['image']"

    def test_a_spawned_process_writes_into_shared_memory(self) -> None:
        rollout = make_rollout(2, 3)
        process = mp.get_context("spawn").Process(target=_collect, args=(rollout,))
        process.start()
        process.join()
        assert process.exitcode == 0
        assert rollout.obs["image"][:, 0, 0].tolist() == [1, 2, 0]
        assert rollout.action.tolist() == [[7] * 3, [8] * 3]
        assert rollout.prev_action is not None
        assert rollout.prev_action.tolist() == [[0] * 3, [7] * 3, [8] * 3]
        assert bool((rollout.reward == 0.5).all())
        assert rollout.core_state.shape == (3, 0)

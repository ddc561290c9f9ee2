"""The names of lockstep's settings in other libraries (Stable-Baselines3, CleanRL, Sample Factory, rlpyt, RLlib, …)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Meaning(NamedTuple):
    """The meaning of another library's name."""

    setting: str
    """The setting's path, such as algorithm.discount. Empty if there is no such setting; then the note explains."""
    note: str = ""
    """How the two differ. Empty if the setting takes the same value."""


_SPLIT = (
    "A rollout of {rollout} steps in each of {num_envs} environments has {samples} samples, which "
    "--algorithm.minibatches {minibatches} splits into batches of {batch}: fewer minibatches make larger batches."
)
_ITERATION = "An iteration collects --algorithm.rollout {rollout} × --env.num-envs {num_envs} = {samples} samples."
_UPDATES = (
    "An iteration takes --algorithm.rollout {rollout} steps in each of {num_envs} environments, and then "
    "--algorithm.updates {updates} gradient steps."
)
_DEVICE = "inline,device=0 and processes:2,device=0 compute on the first GPU; without it, everything runs on the CPU."
_PROCESSES = "It includes the number of processes, as in --layout processes:4; --env.num-envs counts environments."
_FOLDER = "It names the run's folder."
_ARGUMENT = "It takes arguments of the environment's constructor as NAME=VALUE."

_ROWS: tuple[tuple[str, str] | tuple[str, str, str], ...] = (
    ("algorithm.discount", "gamma discount_factor discount_rate"),
    ("algorithm.learning_rate", "lr step_size alpha_lr learning_rates"),
    ("algorithm.actor_learning_rate", "policy_lr pi_lr actor_lr lr_actor lr_pi policy_learning_rate"),
    ("algorithm.learning_rate", "policy_lr pi_lr actor_lr lr_actor lr_pi policy_learning_rate"),
    ("algorithm.learning_rate", "q_lr qf_lr critic_lr lr_critic lr_q critic_learning_rate vf_lr"),
    (
        "algorithm.anneal_learning_rate",
        "anneal_lr lr_schedule learning_rate_schedule use_linear_lr_decay lr_decay linear_decay_learning_rate "
        "learning_rate_scheduler",
        "If on, the rate falls to zero over total_steps.",
    ),
    ("algorithm.anneal", "anneal schedule schedules lr_scheduler lr_warmup", "It takes NAME=FORM."),
    ("algorithm.desired_kl", "desired_kl kl_threshold adaptive_kl adaptive_lr", ""),
    ("algorithm.optimizer.weight_decay", "weight_decay wd l2", ""),
    ("algorithm.gae_lambda", "lam lambda gae td_lambda gae_lam lmbda"),
    ("algorithm.vtrace_lambda", "lam lambda gae td_lambda gae_lam lmbda"),
    ("algorithm.vtrace_lambda", "gae_lambda", "It is V-trace's counterpart of GAE's λ."),
    (
        "algorithm.entropy_coef",
        "ent_coef ent_coeff entropy_coeff entropy_coefficient entropy_loss_scale entropy_weight entropy_cost "
        "exploration_loss_coeff entropy entropy_beta entropy_bonus",
    ),
    (
        "algorithm.initial_temperature",
        "ent_coef ent_coeff entropy_coeff entropy_coefficient entropy_loss_scale entropy_weight entropy_cost "
        "exploration_loss_coeff entropy entropy_beta entropy_bonus",
        "--algorithm.no-learn-temperature keeps its initial value.",
    ),
    ("algorithm.initial_temperature", "alpha"),
    ("algorithm.learn_temperature", "autotune auto_entropy automatic_entropy_tuning auto_alpha learn_entropy"),
    (
        "algorithm.value_coef",
        "vf_coef vf_coeff vf_loss_coeff value_loss_coef value_loss_coeff value_loss_scale critic_loss_coef "
        "baseline_cost",
    ),
    ("algorithm.n_step", "n_steps n_step_returns multi_step num_multi_step nstep"),
    ("algorithm.rollout", "n_steps nstep"),
    (
        "algorithm.rollout",
        "num_steps rollout_length rollout_fragment_length rollout_steps unroll_length horizon rollouts nsteps "
        "steps_per_env",
    ),
    ("algorithm.unroll", "recurrence sequence_length seq_len bptt_horizon batch_t"),
    (
        "algorithm.rollout",
        "recurrence sequence_length seq_len bptt_horizon batch_t",
        "Gradients flow through a rollout.",
    ),
    ("algorithm.burn_in", "warmup_t burnin burn_in_steps"),
    ("algorithm.rollout", "train_batch_size train_batch_size_per_learner", _ITERATION),
    (
        "algorithm.epochs",
        "n_epochs num_epochs update_epochs ppo_epochs ppo_epoch noptepochs learning_epochs num_sgd_iter k_epochs",
    ),
    ("algorithm.batch_size", "batch_size minibatch_size mini_batch_size sgd_minibatch_size"),
    ("algorithm.minibatches", "batch_size minibatch_size mini_batch_size sgd_minibatch_size", _SPLIT),
    (
        "algorithm.minibatches",
        "num_minibatches n_minibatches n_minibatch nminibatches mini_batches num_mini_batch num_batches_per_epoch",
    ),
    (
        "algorithm.clip",
        "clip_range clip_coef clip_param clip_ratio ratio_clip ppo_clip_ratio eps_clip clip_epsilon clip_eps cliprange",
    ),
    (
        "algorithm.value_clip",
        "clip_range_vf vf_clip_param value_clip_param ppo_clip_value clip_value clip_predicted_values clip_vloss",
        "It is a number, and 0 switches it off.",
    ),
    (
        "algorithm.max_grad_norm",
        "grad_norm_clip grad_clip grad_norm max_gradient_norm clip_grad_norm max_grad gradient_clip",
    ),
    ("algorithm.normalize_advantages", "norm_adv normalize_advantage advantage_norm"),
    ("algorithm.target_kl", "kl_target kl_threshold"),
    ("env.num_envs", "n_envs num_env n_env env_num num_environments num_envs_per_env_runner num_envs_per_worker"),
    ("layout", "num_workers n_workers num_env_runners num_processes n_jobs num_actors num_cpus workers", _PROCESSES),
    (
        "total_steps",
        "total_timesteps timesteps n_timesteps num_timesteps max_timesteps total_env_steps max_env_steps env_steps "
        "num_steps_total train_for_env_steps num_env_steps num_train_steps stop_timesteps max_steps num_frames "
        "total_frames steps",
    ),
    ("seed", "random_seed rng_seed"),
    ("layout", "device cuda gpu gpus num_gpus use_gpu use_cuda accelerator", _DEVICE),
    ("env.id", "env env_id env_name gym_id game task environment environment_id"),
    (
        "env.options",
        "env_kwargs env_args env_config frameskip frame_skip env_frameskip frame_stack framestack env_framestack "
        "num_stack n_stack sticky_actions repeat_action_probability max_episode_steps time_limit",
        _ARGUMENT,
    ),
    ("model.popart.rate", "popart use_popart pop_art popart_beta"),
    ("env.reward_clip", "clip_rewards clip_reward reward_clipping"),
    ("env.decorrelate", "decorrelate_experience_max_seconds decorrelate_envs_on_one_worker", "It counts steps."),
    ("env.policies", "policy_mapping_fn policy_mapping"),
    (
        "algorithm.replay.capacity",
        "buffer_size memory_size replay_size replay_buffer_size replay_capacity buffer_capacity replay_memory_size",
    ),
    ("algorithm.replay.prioritized", "prioritized_replay prioritized_experience_replay per"),
    ("algorithm.replay.alpha", "per_alpha pri_alpha prioritized_replay_alpha"),
    ("algorithm.replay.beta", "per_beta pri_beta_init prioritized_replay_beta"),
    ("algorithm.replay.hindsight", "her her_k future_k replay_k n_sampled_goal"),
    ("algorithm.replay.data", "dataset dataset_id dataset_path offline_data minari", "It takes FILE.npz or minari:ID."),
    (
        "algorithm.warmup",
        "learning_starts start_steps random_steps random_timesteps warmup_steps min_replay_size train_start "
        "start_timesteps num_steps_sampled_before_learning_starts initial_random_steps",
    ),
    ("algorithm.anneal", "warmup_steps", "It takes NAME=FORM."),
    ("algorithm.target_rate", "tau soft_update_tau target_smoothing_coef"),
    ("algorithm.target_rate", "polyak", "It is 1 - polyak."),
    (
        "algorithm.target_period",
        "target_update_interval target_network_frequency target_network_update_freq target_update_freq "
        "target_update target_update_period",
        "It counts gradient steps, not environment steps.",
    ),
    (
        "algorithm.rollout",
        "train_freq train_frequency update_every update_frequency update_interval learning_freq",
        _UPDATES,
    ),
    (
        "algorithm.updates",
        "gradient_steps utd utd_ratio updates_per_step replay_ratio training_intensity num_updates",
        _UPDATES,
    ),
    (
        "algorithm.epsilon_fraction",
        "exploration_fraction epsilon_decay eps_decay epsilon_timesteps",
        "It is a share of total_steps.",
    ),
    ("algorithm.epsilon_end", "exploration_final_eps final_epsilon eps_end eps_final end_e min_epsilon epsilon_final"),
    ("algorithm.epsilon_start", "exploration_initial_eps initial_epsilon eps_start eps_init start_e"),
    ("algorithm.policy_period", "policy_frequency policy_delay policy_freq actor_update_freq"),
    ("algorithm.smoothing_std", "policy_noise target_policy_noise target_noise"),
    ("algorithm.smoothing_clip", "noise_clip target_noise_clip"),
    ("algorithm.noise_std", "exploration_noise action_noise act_noise expl_noise noise"),
    ("algorithm.double", "double_q double_dqn"),
    ("model.numbers", "n_atoms num_atoms n_quantiles num_quantiles"),
    ("model.v_min", "vmin"),
    ("model.v_max", "vmax"),
    (
        "model.hidden_sizes",
        "net_arch hidden_size hidden_dim hidden_layers fcnet_hiddens mlp_layers encoder_mlp_layers hidden",
        "It takes a width for each layer, as in 64 64.",
    ),
    ("model.activation", "activation_fn fcnet_activation nonlinearity"),
    ("model.core", "use_lstm lstm use_rnn rnn recurrent rnn_type use_gru gru", "gru and lstm give the model memory."),
    ("model.core_size", "lstm_hidden_size rnn_hidden_size rnn_size lstm_cell_size"),
    (
        "model.initial_std",
        "log_std_init init_std init_log_std action_std_init",
        "It is the deviation, not its logarithm.",
    ),
    ("normalize.observations", "norm_obs obs_norm normalize_obs normalize_input normalize_observation"),
    ("normalize.returns", "norm_reward reward_norm normalize_reward normalize_rewards norm_return"),
    (
        "normalize.returns",
        "reward_scale reward_scaling scale_reward scale_rewards",
        "It divides rewards by the deviation of returns. Multiply by a constant in the environment.",
    ),
    ("", "obs_scale obs_subtract_mean normalize_images", "Leave it out: models divide pixels by their highest value."),
    ("normalize.clip", "clip_obs clip_observations"),
    ("algorithm.optimizer.eps", "adam_eps adam_epsilon optimizer_eps opt_eps"),
    ("scheme.lag", "async_rl asynchronous async_mode", "async lets timing decide which version collects which data."),
    ("scheme.max_lag", "max_policy_lag max_staleness", "It needs --scheme.lag async."),
    ("precision", "dtype mixed_precision amp bf16 fp16 autocast", "bf16, fp32 and portable are allowed."),
    ("torch_threads", "threads num_threads torch_num_threads n_threads"),
    ("wandb", "track use_wandb with_wandb wandb_project wandb_project_name", "It takes the project's name."),
    ("tensorboard", "tensorboard_log tb_log use_tensorboard", "It is on, and writes into the run's folder."),
    (
        "run",
        "exp_name experiment experiment_name run_name run_id log_dir logdir log_path save_path save_dir output "
        "output_dir outdir out train_dir run_dir run_folder run_path folder directory storage_path name",
        _FOLDER,
    ),
    (
        "checkpoint_every",
        "save_freq save_interval save_every save_model checkpoint_freq checkpoint_interval checkpoint_frequency",
        "It counts iterations.",
    ),
    (
        "eval_every",
        "eval_freq eval_interval evaluation_interval eval_frequency evaluate_every test_interval",
        "It counts iterations.",
    ),
    ("eval_episodes", "n_eval_episodes num_eval_episodes evaluation_duration"),
    ("episodes", "n_eval_episodes num_eval_episodes evaluation_duration"),
    ("callback", "callbacks hook hooks on_iteration"),
    ("env.metrics", "info_keywords info_keys"),
    ("greedy", "deterministic stochastic sample argmax explore", "Without it, actions are drawn from the policy."),
    ("sample", "greedy deterministic stochastic argmax", "Without it, the file takes the most likely actions."),
    ("episodes", "n_episodes num_episodes max_num_episodes"),
    ("total_steps", "n_episodes num_episodes max_num_episodes", "It counts steps, not episodes."),
    ("display", "verbose progress progress_bar quiet log_interval overview"),
    (
        "warm_start.run",
        "load pretrained load_path init_from trained_agent model_path load_model_path load_checkpoint resume "
        "resume_from resume_path restart_behavior",
        "lockstep resume RUN continues a run instead.",
    ),
    (
        "",
        "capture_video save_video video record_video render render_mode no_render",
        "Videos are recorded of trained policies: lockstep record RUN.",
    ),
    (
        "model.critic_only",
        "critic_only privileged_obs privileged_observations critic_obs critic_obs_keys critic_observations asymmetric "
        "asymmetric_obs",
        "It takes the keys of a Dict observation.",
    ),
    (
        "",
        "config config_file config_path cfg cfg_path yaml",
        "Settings come from a recipe, which may be your own FILE.py:FUNCTION, or from the folder of a run: lockstep "
        "train runs/a.",
    ),
    ("", "policy_kwargs model_kwargs", "The settings --model.… determine the network."),
    (
        "",
        "pbt with_pbt num_policies population_size",
        "A sweep trains several agents: lockstep sweep FOLDER RECIPE --population 8 --search SETTING=LOW..HIGH.",
    ),
    (
        "",
        "n_trials num_trials num_samples optuna search hyperparameter_search",
        "lockstep sweep FOLDER RECIPE --trials 40 --search SETTING=LOW..HIGH searches settings.",
    ),
    ("", "torch_deterministic cudnn_deterministic", "Leave it out: every run is repeatable, bit for bit."),
    ("", "algo algorithm policy trainer agent", "The recipe chooses it: lockstep recipes lists them."),
)
"""Settings, their names elsewhere, and notes. A name means the first row with a setting that the algorithm has."""

_MEANINGS: dict[str, list[Meaning]] = {}


def _plain(name: str) -> str:
    """The last part of a name, spelled uniformly: --batch-size, batch_size and batchSize are equal."""
    return name.rpartition(".")[2].replace("-", "").replace("_", "").lower()


for _setting, _names, *_note in _ROWS:
    for _name in _names.split():
        _MEANINGS.setdefault(_plain(_name), []).append(Meaning(_setting, *_note))


def synonyms(name: str) -> list[Meaning]:
    """The settings that other libraries give this name, best first. An algorithm may lack some of them."""
    return _MEANINGS.get(_plain(name), [])


def settings_called(name: str) -> list[str]:
    """The settings with this name. An algorithm may lack some of them."""
    return [setting for setting, *_ in _ROWS if setting and _plain(setting) == _plain(name)]


def meaning_of(name: str, settings: Iterable[str]) -> list[Meaning]:
    """The possible meanings of an unknown name among these settings, given by their paths.

    The result is a setting whose path ends with the name (algorithm.epochs for epochs), or one that has this name in
    other libraries. It has several entries if the name is ambiguous, and none if it is unknown.
    """
    known = list(settings)
    ending = [path for path in known if _plain(path) == _plain(name)]
    if near := [path for path in ending if path.count(".") <= 1]:
        return [Meaning(path) for path in near]
    same = [each for each in synonyms(name) if each.setting in known or not each.setting]
    return same[:1] or [Meaning(path) for path in ending]

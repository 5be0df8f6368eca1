"""Names that TRL, axolotl and LLaMA-Factory give to settings of objectives, and the fields that take their values.

The closest name of the spec may mean something else: `num_generations` is like `num_iterations`.
"""

from __future__ import annotations

OTHER_NAMES = {
    "num_generations": "objective.group_size",
    "reward_funcs": "objective.rewards",
    "reward_weights": "objective.rewards",
    "reward_model_path": "objective.rewards",
    "loss_type": "objective.loss",
    "pref_loss": "objective.loss",
    "importance_sampling_level": "objective.loss",
    "epsilon_low": "objective.epsilon",
    "kl_coef": "objective.beta",
    "pref_beta": "objective.beta",
    "rl_beta": "objective.beta",
    "orpo_alpha": "objective.beta",
    "cpo_alpha": "objective.alpha",
    "simpo_gamma": "objective.gamma",
    "dpo_label_smoothing": "objective.label_smoothing",
    "kto_desirable_weight": "objective.desirable_weight",
    "kto_undesirable_weight": "objective.undesirable_weight",
    "mask_truncated_completions": "objective.overlong",
    "vllm_importance_sampling_cap": "objective.importance_cap",
    "max_completion_length": "objective.generation.max_new_tokens",
    "use_vllm": "objective.generation.engine",
    "vllm_mode": "objective.generation.engine",
    "vllm_server_base_url": "objective.generation.server",
    "vllm_server_host": "objective.generation.server",
    "vllm_gpu_memory_utilization": "objective.generation.gpu_memory_utilization",
    "max_prompt_length": "data.sequence_length",
}

"""The words of other tools for settings and commands, and what they are called here.

The tools are TRL, verl, OpenRLHF and the Trainer of transformers. A word is written in lower case with underscores. A
setting in braces, such as {optim.lr}, is shown as the user writes settings: as a flag or, in Python, as a key.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ForeignEntry:
    """Words of other tools that mean the same, and what to use here."""

    words: str  # separated by spaces; with dots if only a part of a longer name is clear
    settings: str = ""  # ours, separated by spaces; the entry counts only where one of them exists. "" = everywhere
    note: str = ""  # how ours differs, or what to do if there is none


_NO_SUCH = "Cohort has no such setting: "
_TRUNCATES = "It needs {sampling.allow_truncation} True."
_LENGTHS = "max_completion_length max_new_tokens max_response_length response_length generate_max_len max_gen_length"
_GROUP = "num_generations n group_size n_samples_per_prompt samples_per_prompt num_return_sequences num_samples"
_PRECISION = "bf16 fp16 tf32 fp32 torch_dtype precision mixed_precision param_dtype"

# Of several entries with the same word the first one counts that has a setting which the command knows.
SETTINGS: tuple[ForeignEntry, ...] = (
    # The optimizer.
    ForeignEntry("learning_rate lr rate actor_learning_rate actor_lr policy_lr", "optim.lr"),
    ForeignEntry(
        "warmup_ratio lr_warmup_ratio lr_warmup_steps_ratio",
        "optim.warmup",
        "It is a number of optimizer steps, not a share of the run.",
    ),
    ForeignEntry("warmup_steps num_warmup_steps lr_warmup_steps", "optim.warmup"),
    ForeignEntry(
        "lr_scheduler_type lr_scheduler scheduler lr_schedule scheduler_type",
        "optim.schedule",
        "It is constant, linear or cosine.",
    ),
    ForeignEntry("min_lr min_lr_ratio", "optim.lr_floor", "It is a share of {optim.lr}, not a rate."),
    ForeignEntry("max_grad_norm grad_clip clip_grad gradient_clipping max_norm grad_norm", "optim.clip_norm"),
    ForeignEntry("adam_beta1", "optim.beta1"),
    ForeignEntry("adam_beta2", "optim.beta2"),
    ForeignEntry("betas adam_betas", "optim.beta1 optim.beta2"),
    ForeignEntry("adam_epsilon adam_eps", "optim.eps"),
    ForeignEntry("wd decay", "optim.weight_decay"),
    ForeignEntry("optimizer", "optim.lr optim.schedule", "The optimizer is always AdamW."),
    # The batch.
    ForeignEntry(
        "batch_size train_batch_size global_batch_size rollout_batch_size generation_batch_size num_prompts",
        "batch.prompts batch.samples",
        "A batch is prompts per step x samples per prompt.",
    ),
    ForeignEntry(
        "per_device_train_batch_size per_device_batch_size",
        "batch.prompts batch.samples",
        "A batch is prompts per step x samples per prompt; {learner.token_budget} limits what is computed at once.",
    ),
    ForeignEntry(
        "batch_size train_batch_size global_batch_size per_device_train_batch_size per_device_batch_size prompts",
        "batch.examples",
    ),
    ForeignEntry(
        "per_device_eval_batch_size eval_batch_size val_batch_size batch_size",
        "engine.slots slots",
        "It is the number of samples that are decoded at the same time, in training and evaluation.",
    ),
    ForeignEntry(
        "gradient_accumulation_steps micro_batch_size micro_train_batch_size ppo_micro_batch_size"
        " ppo_micro_batch_size_per_gpu accumulation_steps",
        "learner.token_budget",
        "Microbatches follow from a budget of tokens. It changes memory and speed, never the result.",
    ),
    ForeignEntry(_GROUP, "batch.samples samples"),
    ForeignEntry(
        "mini_batch_size ppo_mini_batch_size num_mini_batches steps_per_generation",
        "learner.minibatches",
        "It is the number of minibatches per batch, not their size.",
    ),
    ForeignEntry("num_iterations ppo_epochs mu", "learner.epochs", "It is the number of passes over each batch."),
    # The length of the run.
    ForeignEntry(
        "num_train_epochs num_epochs epochs total_epochs max_epochs num_episodes",
        "steps",
        "A run is counted in steps. One pass over the rows is their number / the prompts per step.",
    ),
    ForeignEntry(
        "max_steps total_training_steps total_steps num_steps train_steps num_train_steps training_steps", "steps"
    ),
    ForeignEntry("random_seed manual_seed data_seed", "seed"),
    # Sampling.
    ForeignEntry("temperature", "sampling.temperature", "In evaluations it is {eval.temperature}."),
    ForeignEntry("top_p", "sampling.top_p", _TRUNCATES),
    ForeignEntry("top_k", "sampling.top_k", _TRUNCATES),
    ForeignEntry("min_p", "sampling.min_p", _TRUNCATES),
    ForeignEntry(_LENGTHS, "sampling.max_tokens max_tokens completion_tokens"),
    ForeignEntry(
        "max_prompt_length prompt_max_len",
        "",
        _NO_SUCH
        + "a prompt may fill what a completion of {sampling.max_tokens} leaves of the model's context. Remove it.",
    ),
    ForeignEntry(
        "max_seq_length max_seq_len max_length max_model_len cutoff_len",
        "",
        _NO_SUCH + "the model's context is the limit. Use {sampling.max_tokens} to limit completions.",
    ),
    ForeignEntry("stop_words stop_strings stop_sequences stop_token_ids eos_token", "sampling.stop stop"),
    ForeignEntry("chat_template apply_chat_template tokenizer_chat_template", "template"),
    # The algorithm.
    ForeignEntry(
        "beta kl kl_coef kl_coeff init_kl_coef init_kl_coeff kl_loss_coef kl_beta",
        "algo.kl.weight",
        "It is the coefficient of the KL penalty; 0 = no penalty.",
    ),
    ForeignEntry("beta dpo_beta", "algo.beta loss.beta", "It is the factor of the difference of the two scores."),
    ForeignEntry(
        "algo.loss algo.loss.beta",
        "algo",
        "The loss is in the name of the algorithm, online_dpo or online_ipo for example, and its settings are its own.",
    ),
    ForeignEntry(
        "use_kl_loss use_kl_in_reward kl_in_reward",
        "algo.kl.place",
        "It is loss or reward; {algo.kl.weight} above 0 turns the penalty on.",
    ),
    ForeignEntry("kl_loss_type kl_penalty kl_estimator kl_type", "algo.kl.estimator"),
    ForeignEntry("target_kl kl_target", "algo.kl.target"),
    ForeignEntry("sync_ref_model ref_model_sync_steps ref_reset_step", "algo.kl.refresh"),
    ForeignEntry(
        "epsilon eps_clip clip_eps cliprange clip_range clip_ratio ppo_clip",
        "algo.clip_low algo.clip_high",
        "Set both: one is the bound below the ratio 1, the other the bound above.",
    ),
    ForeignEntry(
        "epsilon epsilon_high cliprange clip_range clip_ratio clip_ratio_high eps_clip_high", "algo.clip_high"
    ),
    ForeignEntry("epsilon_high clip_ratio_high eps_clip_high cliprange_high", "algo.clip_high"),
    ForeignEntry("epsilon_low clip_ratio_low eps_clip_low cliprange_low", "algo.clip_low"),
    ForeignEntry("delta clip_ratio_c dual_clip_ratio", "algo.dual_clip"),
    ForeignEntry("entropy_coeff entropy_coef ent_coef entropy_loss_coef entropy_bonus", "algo.entropy"),
    ForeignEntry(
        "scale_rewards norm_adv_by_std_in_grpo whiten_rewards normalize_rewards normalize_advantages",
        "algo.scale",
        "std = by the group, batch = by the batch, none = not scaled.",
    ),
    ForeignEntry(
        "loss_type loss_mode",
        "algo",
        "It is the algorithm: grpo, dr_grpo, dapo, cispo and others. {algo.aggregate} is how tokens are averaged.",
    ),
    ForeignEntry("loss_agg_mode loss_aggregation", "algo.aggregate"),
    ForeignEntry("adv_estimator advantage_estimator algorithm trainer", "algo"),
    ForeignEntry("importance_sampling_level", "algo", "gspo has one ratio per sample, grpo one per token."),
    ForeignEntry(
        "mask_truncated_completions overlong_filtering",
        "algo.truncated",
        "mask leaves truncated completions out of the loss.",
    ),
    ForeignEntry("dynamic_sampling filter_groups", "algo.dead", "refill replaces groups without a signal."),
    ForeignEntry(
        "vllm_importance_sampling_correction importance_sampling_correction tis tis_imp_ratio_cap",
        "algo.correction.kind",
    ),
    ForeignEntry(
        "gamma discount_factor",
        "algo.credit.discount",
        "It is a factor per turn of a conversation, with {algo.credit.per} turn.",
    ),
    ForeignEntry(
        "lam gae_lambda vf_coef cliprange_value critic value_model",
        "",
        _NO_SUCH
        + "there is no critic. A sample is compared with the other samples of its group ({algo.baseline}). Remove it.",
    ),
    # Task and reward. SFT and DPO have data, and perhaps a task besides: so data come first.
    ForeignEntry(
        "dataset dataset_name dataset_path train_file train_files data_path train_data",
        "data.path data",
        "It chooses the rows that are learnt from.",
    ),
    ForeignEntry("dataset_train_split dataset_split train_split", "data.train_split"),
    ForeignEntry("dataset_test_split eval_split test_split", "data.test_split"),
    ForeignEntry("formatting_func map_fn map_function preprocess_fn", "data.map", "It is a function, as file.py:NAME."),
    ForeignEntry(
        "dataset dataset_name dataset_path train_file train_files prompt_data data_path train_data",
        "task.data",
        "{task} chooses the task; for another task, see docs/tasks.md.",
    ),
    ForeignEntry(
        "dataset dataset_name dataset_path train_file train_files prompt_data data_path train_data data",
        "task",
        "Rows come from a task. gsm8k reads a file of yours with {task.data}; docs/tasks.md shows how to write a task.",
    ),
    ForeignEntry(
        "reward_funcs reward_func reward_function reward_fn reward_model reward_model_path custom_reward_function"
        " remote_rm_url",
        "task",
        "The reward is the method score of a task: write one as docs/tasks.md shows, and choose it with file.py:NAME.",
    ),
    ForeignEntry(
        "reward_weights reward_coeff",
        "",
        "Each part of the reward has its own setting, {reward.PART}, for example {reward.correct}.",
    ),
    ForeignEntry("system_prompt system_message", "system"),
    # The model and the machine.
    ForeignEntry(
        "model_name_or_path model_name model_path model_id pretrain pretrained base_model model.path policy_model",
        "model",
    ),
    ForeignEntry("lora_r lora_rank r use_peft use_lora peft", "learner.lora.rank", "Above 0 it turns adapters on."),
    ForeignEntry("lora_alpha", "learner.lora.alpha"),
    ForeignEntry("lora_target_modules target_modules lora_targets", "learner.lora.targets"),
    ForeignEntry(
        "load_in_4bit use_qlora",
        "learner.lora.base",
        "nf4 stores the frozen weights in 4 bits; {learner.lora.rank} above 0 turns adapters on.",
    ),
    ForeignEntry("adapter_path lora_path peft_path", "learner.lora.load"),
    ForeignEntry("lora_dropout dropout disable_dropout", "", _NO_SUCH + "nothing is dropped out. Remove it."),
    ForeignEntry(_PRECISION, "learner.dtype dtype", "auto = bfloat16 on a GPU, float32 on a CPU."),
    ForeignEntry("cuda gpu gpus use_cpu no_cuda", "device"),
    ForeignEntry("num_threads n_threads", "threads"),
    ForeignEntry(
        "gradient_checkpointing activation_checkpointing enable_gradient_checkpointing",
        "learner.token_budget",
        "Activations are computed again where memory is short, without a setting. A smaller budget needs less memory.",
    ),
    ForeignEntry(
        "use_vllm vllm_mode vllm_gpu_memory_utilization gpu_memory_utilization vllm_num_engines",
        "",
        _NO_SUCH + "--engine vllm samples with vLLM, and --engine.memory is its share of the GPU's memory. "
        "Remove this flag; docs/engines.md has more.",
    ),
    ForeignEntry(
        "num_processes nnodes n_gpus_per_node num_gpus tensor_parallel_size fsdp deepspeed zero_stage tp dp",
        "",
        "Use {ranks}: the processes that train together, one per GPU. {learner.shard} and {learner.tensor} divide the "
        "model among them.",
    ),
    ForeignEntry(
        "attn_implementation flash_attn use_liger_kernel torch_compile use_remove_padding packing",
        "",
        _NO_SUCH + "the fastest way for the device is always used. Remove it.",
    ),
    ForeignEntry(
        "dataloader_num_workers num_workers reward_num_workers",
        "",
        _NO_SUCH + "scoring workers are started as needed. Remove it.",
    ),
    # Logs, evaluations and files.
    ForeignEntry(
        "output_dir save_path default_local_dir logging_dir output",
        "",
        "Use {out}: the folder in which run directories are made.",
    ),
    ForeignEntry(
        "run_name experiment_name project_name wandb_run_name wandb_project exp_name",
        "",
        "Use {name}: the name of the run; {out} is the folder in which it is made.",
    ),
    ForeignEntry(
        "report_to logger use_wandb log_with use_tensorboard wandb",
        "",
        "Use {sinks}: wandb, tensorboard or trackio, separated by commas.",
    ),
    ForeignEntry(
        "logging_steps logging_strategy log_interval log_freq logging_first_step",
        "",
        _NO_SUCH + "every step is logged. Remove it.",
    ),
    ForeignEntry(
        "eval_steps eval_strategy evaluation_strategy test_freq eval_freq eval_interval eval_every", "eval.every"
    ),
    ForeignEntry(
        "eval_on_start val_before_train", "", _NO_SUCH + "a run is always evaluated before the first step. Remove it."
    ),
    ForeignEntry("problems num_problems max_eval_samples num_eval_samples eval_size", "eval.problems limit"),
    ForeignEntry("save_steps save_freq save_interval save_strategy save_every", "save.every"),
    ForeignEntry("save_total_limit max_to_keep", "save.keep_last"),
    ForeignEntry("load_best_model_at_end", "save.keep_best"),
    ForeignEntry(
        "config config_file config_path config_name config_dir",
        "",
        "The config.yaml of a run takes the place of a recipe: cohort train path/config.yaml.",
    ),
    ForeignEntry("resume_from_checkpoint resume_mode resume", "", "A stopped run is continued by: cohort resume RUN."),
    ForeignEntry(
        "multirun sweep grid num_trials n_trials",
        "",
        "Write several values of a setting with commas: cohort sweep RECIPE --optim.lr 1e-4,3e-4.",
    ),
    ForeignEntry("seeds num_seeds n_seeds", "seed", "Several seeds are a sweep: cohort sweep RECIPE --seeds 2."),
    ForeignEntry(
        "push_to_hub hub_model_id",
        "",
        _NO_SUCH + "cohort export RUN OUT writes a folder that other programs load and upload.",
    ),
)

# Commands of other tools, with what to write here.
COMMANDS: dict[str, str] = {
    "fit learn start launch run finetune rl": "Did you mean cohort train RECIPE?",
    "tune grid multirun sweeps search hpo gridsearch": "Did you mean cohort sweep RECIPE --a.b v1,v2?",
    "sft": "Supervised fine-tuning is a kind of recipe: cohort train tiny_sft.",
    "evaluate test val validate score": "Did you mean cohort eval TASK --model MODEL? Or, to test a recipe's reward, "
    "cohort check RECIPE?",
    "serve server": "Cohort serves no models. cohort export RUN OUT writes a folder that a server such as vLLM loads.",
    "generate predict infer inference sample repl talk ask prompt complete interactive": "Did you mean cohort chat "
    "MODEL? It also answers the lines of a pipe. cohort eval TASK --model MODEL writes every answer to a file.",
    "continue restart": "Did you mean cohort resume RUN?",
    "download fetch get": "Did you mean cohort pull MODEL?",
    "save merge convert": "Did you mean cohort export RUN OUT?",
    "push upload": "Cohort uploads nothing. cohort export RUN OUT writes a folder that other programs load and upload.",
    "list ls": "Did you mean cohort runs? cohort models lists the models, and cohort train --help the recipes.",
    "status ps jobs history leaderboard top": "Did you mean cohort runs?",
    "recipes": "cohort train --help lists the recipes.",
    "tasks": "cohort eval --help lists the tasks.",
    "curves curve graph chart draw visualize visualise": "Did you mean cohort plot RUN?",
    "logs show": "cohort runs lists the runs, cohort explain RUN shows a step, and each run has a card, run.md.",
    "benchmark": "Did you mean cohort bench engine, learner or step?",
    "diff": "Did you mean cohort compare A B?",
    "version": "Did you mean cohort --version?",
}

# Algorithms that only other tools have, with what to use here.
ALGORITHMS: dict[str, str] = {
    "ppo": "There is no critic, and so no PPO. Its clipped loss without one is grpo: cohort train RECIPE --algo grpo.",
    "dpo ipo hinge robust simpo orpo": "With pairs from a reward it is --algo online_dpo (or online_ipo, online_simpo "
    "and others). Given pairs are a kind of run: cohort train dpo --data.path FILE.",
    "kto": "Cohort compares answers in pairs: cohort train RECIPE --algo online_dpo, or cohort train dpo --data.path "
    "FILE.",
}

"""What the plugin uses of OpenRLHF, beyond what can be read off its own sources. The one place for these facts: they
are checked of the installed release (test_host.py) and of every supported one (test_releases.py)."""

MAIN = "openrlhf.cli.train_ppo_ray"

# class or function -> (method ->) parameters without self
SIGNATURES = {
    "openrlhf.utils.deepspeed.deepspeed.DeepspeedStrategy": {
        "_ds_init_train_model": ["model", "cfg"],
        "get_ds_train_config": ["optim_dict", "max_norm"],
        "optimizer_step": ["_optimizer", "model", "_scheduler", "name", "kwargs"],
        "get_grad_norm": ["model"],
        "save_ckpt": [
            "model",
            "save_dir",
            "tag",
            "max_num",
            "max_mem",
            "client_state",
            "save_latest",
            "metric_value",
            "metric_key",
        ],
        "load_ckpt": [
            "model",
            "load_dir",
            "tag",
            "load_module_strict",
            "load_optimizer_states",
            "load_lr_scheduler_states",
            "load_module_only",
        ],
        "print": ["msg"],
    },
    "openrlhf.trainer.ray.ppo_actor.ActorPPOTrainer": {
        "__init__": [
            "strategy",
            "actor",
            "ema_model",
            "actor_optim",
            "actor_scheduler",
            "ema_beta",
            "micro_train_batch_size",
            "buffer_limit",
            "buffer_cpu_offload",
            "eps_clip",
            "tokenizer",
            "dataloader_pin_memory",
            "vllm_engines",
            "kwargs",
        ],
        "_init_vllm_sync_group": ["backend"],
        "training_step": ["experience", "kl_ctl", "step", "loss_batch_info"],
        "ppo_train": ["kl_ctl"],
        "broadcast_to_vllm": [],
    },
    "openrlhf.trainer.ray.ppo_actor.PolicyModelActor": {
        "_get_free_port": [],
        "init_model_from_pretrained": ["strategy", "pretrain", "max_steps", "vllm_engines"],
        "offload_states": [],
        "reload_states": [],
    },
    "openrlhf.trainer.ray.vllm_engine.RolloutRayActor": {
        "__init__": ["args", "bundle_indices", "agent_func_path", "remote_rm_url", "mm_pad_token_ids", "kwargs"],
        # Calls the worker extension's method of this name, with these arguments in this order.
        "init_process_group": [
            "master_address",
            "master_port",
            "rank_offset",
            "world_size",
            "group_name",
            "backend",
            "use_ray",
        ],
        "generate": ["prompt_token_ids", "sampling_params", "multi_modal_data"],
        "generate_responses": [
            "prompt",
            "label",
            "sampling_params",
            "max_length",
            "hf_tokenizer",
            "num_samples",
            "images",
        ],
    },
    "openrlhf.trainer.ppo_trainer.PPOTrainer": {
        "fit": ["global_step"],
        "train_step": ["rollout_samples", "global_step"],
        "evaluate": ["global_step", "generate_kwargs"],
        "save_logs_and_checkpoints": ["global_step", "logs_dict", "client_states"],
        "save_best_checkpoint": ["eval_metrics", "global_step", "client_states"],
        "restore_best_checkpoint_state": ["checkpoint_states"],
    },
    "openrlhf.trainer.ppo_trainer_async.TrainingActor": {
        "broadcast_to_vllm": [],
        "train_step": ["rollout_samples", "global_step"],
        "save_logs_and_checkpoints": ["global_step", "logs_dict", "client_states"],
        "save_best_checkpoint": ["eval_metrics", "global_step", "client_states"],
        "restore_best_checkpoint_state": ["checkpoint_states"],
    },
    "openrlhf.trainer.ppo_trainer_async.PPOTrainerAsync": {},
    "openrlhf.trainer.ppo_utils.experience_maker.RemoteExperienceMaker": {
        "compute_advantages_and_returns": ["experiences"],
    },
    "openrlhf.trainer.ppo_utils.experience_maker.apply_length_penalties": ["experiences", "args"],
    "openrlhf.utils.utils.get_strategy": ["args"],
    "openrlhf.utils.config.hierarchize": ["args"],
    "openrlhf.utils.distributed_util.stateless_init_process_group": [
        "master_address",
        "master_port",
        "rank",
        "world_size",
        "device",
    ],
}

# name that the plugin replaces -> what must look it up there, each time it is called
REPLACED = {
    f"{MAIN}.get_strategy": f"{MAIN}.train",
    f"{MAIN}.PolicyModelActor": f"{MAIN}.train",
    "openrlhf.trainer.ray.vllm_engine.RolloutRayActor": "openrlhf.trainer.ray.vllm_engine.create_vllm_engines",
    "openrlhf.trainer.ppo_trainer.PPOTrainer": f"{MAIN}.train",
    "openrlhf.trainer.ppo_trainer_async.PPOTrainerAsync": f"{MAIN}.train",
    "openrlhf.trainer.ppo_trainer_async.TrainingActor": "openrlhf.trainer.ppo_trainer_async.PPOTrainerAsync.__init__",
    "openrlhf.trainer.ray.ppo_actor.ActorPPOTrainer": (
        "openrlhf.trainer.ray.ppo_actor.PolicyModelActor.init_model_from_pretrained"
    ),
    "openrlhf.trainer.ppo_utils.experience_maker.apply_length_penalties": (
        "openrlhf.trainer.ppo_utils.experience_maker.RemoteExperienceMaker.compute_advantages_and_returns"
    ),
}

# Keyword arguments of a rollout actor that ours reads or replaces.
ENGINE_ARGUMENTS = {
    "distributed_executor_backend",
    "enable_prefix_caching",
    "enable_sleep_mode",
    "tensor_parallel_size",
    "worker_extension_cls",
}

# What is read of an experience.
EXPERIENCE = "openrlhf.trainer.ppo_utils.experience.Experience"
EXPERIENCE_FIELDS = {
    "action_log_probs",
    "action_mask",
    "attention_mask",
    "rewards",
    "rollout_log_probs",
    "sequences",
    "truncated",
}

# What host/cpu.py and host/cpu_attention.py stand in for.
FLASH_ATTENTION = {
    ("flash_attn.bert_padding", "index_first_axis"),
    ("flash_attn.bert_padding", "pad_input"),
    ("flash_attn.bert_padding", "rearrange"),
    ("flash_attn.bert_padding", "unpad_input"),
    ("flash_attn.utils.distributed", "all_gather"),
    ("ring_flash_attn", "substitute_hf_flash_attn"),
    ("ring_flash_attn", "update_ring_flash_attn_params"),
}

# Flags of which every release has one; the code asks which.
EITHER = ({"algo.advantage.is_correction_level", "algo.advantage.is_correction_enable"},)

"""Methods that a vLLM worker gains (`worker_extension_cls`), so that one RPC applies a sync and returns its report."""

from vllm.config import set_current_vllm_config


class LograWorkerExtension:
    """Mixed into vLLM's Worker. Its names must not be attributes of any Worker (tests/contract)."""

    def logra_initialise(self, init_info: dict) -> dict:
        """Learn the layout; returns `LograWeightTransferEngine.describe_layout()`."""
        with set_current_vllm_config(self.vllm_config):
            self.init_weight_transfer_engine(init_info)
        return self.weight_transfer_engine.describe_layout()

    def init_process_group(
        self, master_address, master_port, rank_offset, world_size, group_name, backend="nccl", use_ray=False
    ) -> None:
        """Join the trainer's group of all workers. Called through OpenRLHF's rollout actor, whose signature it is."""
        import torch
        from openrlhf.utils.distributed_util import stateless_init_process_group

        rank = torch.distributed.get_rank() + rank_offset
        group = stateless_init_process_group(master_address, master_port, rank, world_size, self.device)
        self.weight_transfer_engine.channel = group

    def logra_sync(self, update_info: dict) -> dict:
        """Apply records; returns `LograWeightTransferEngine.apply()`'s report."""
        engine = self.weight_transfer_engine
        with set_current_vllm_config(self.vllm_config):
            return engine.apply(engine.parse_update_info(update_info))

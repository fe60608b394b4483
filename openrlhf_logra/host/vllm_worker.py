"""Methods that a vLLM worker gains (`worker_extension_cls`), so that one RPC applies a sync and returns its report."""

from vllm.config import set_current_vllm_config


class LograWorkerExtension:
    """Mixed into vLLM's Worker. Its names must not be attributes of any Worker (tests/contract)."""

    def logra_initialise(self, init_info: dict) -> dict:
        """Learn the layout; returns `LograWeightTransferEngine.describe_layout()`."""
        with set_current_vllm_config(self.vllm_config):
            self.init_weight_transfer_engine(init_info)
        return self.weight_transfer_engine.describe_layout()

    def logra_sync(self, update_info: dict) -> dict:
        """Apply records; returns `LograWeightTransferEngine.apply()`'s report."""
        engine = self.weight_transfer_engine
        with set_current_vllm_config(self.vllm_config):
            return engine.apply(engine.parse_update_info(update_info))

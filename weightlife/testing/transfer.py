# SPDX-License-Identifier: Apache-2.0
"""A weight-transfer engine for vLLM whose wire is a folder of safetensors.

It has the shape of vLLM's own engines (start and finish bracket a layerwise reload, each update loads one
bucket), but needs neither a trainer nor a GPU:

    LLM(..., weight_transfer_config=WeightTransferConfig(backend=transfer.BACKEND))
    llm.collective_rpc("start_weight_update")
    llm.collective_rpc("update_weights", kwargs={"update_info": {"folder": ..., "names": [...]}})
    llm.collective_rpc("finish_weight_update")
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from weightlife.testing._source import read

BACKEND: Final = "weightlife_test_folder"


@dataclass
class FolderInitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is not followed
    """Nothing to agree on beforehand."""


@dataclass
class FolderUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]  # vLLM is not followed
    """One bucket: tensors `names` of the checkpoint in `folder`, in that order.

    `dtype_names` and `shapes` are announced as vLLM's own engines do, and not used here.
    """

    folder: str = ""
    names: list[str] = field(default_factory=list)
    dtype_names: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)


class FolderTransferEngine(WeightTransferEngine[FolderInitInfo, FolderUpdateInfo]):  # type: ignore[misc]  # vLLM is not followed
    """Loads each bucket from disk into a layerwise reload."""

    init_info_cls = FolderInitInfo
    update_info_cls = FolderUpdateInfo

    def init_transfer_engine(self, init_info: FolderInitInfo) -> None:
        """No connection to make."""

    def start_weight_update(self) -> None:
        """Begin a layerwise reload of the model."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: FolderUpdateInfo) -> None:
        """Load one bucket."""
        weights = list(read(Path(update_info.folder), update_info.names))
        self.model.load_weights(weights)

    def finish_weight_update(self) -> None:
        """End the layerwise reload."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """No connection to close."""


def register() -> None:
    """Make `BACKEND` known to vLLM in this process; twice is once."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, FolderTransferEngine)

"""vLLM weight-transfer engine "safetensors": new weights come from a file in the weight store, or from a weight server.

Phases, as vLLM calls them: ``init_transfer_engine`` once, then for each update ``start_weight_update``,
``update_weights`` with one whole file, ``finish_weight_update``. The file is read and checked before the model is
touched, so that a bad one leaves the server with the weights it had. Layers are on the ``meta`` device while a reload
runs; that is only so inside ``update_weights`` and until ``finish_weight_update``, during which the server is paused.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.logger import init_logger
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from services.rollout import pull, weights

logger = init_logger("vllm.nightshift")

#: Folder that the server was started with; files from elsewhere are refused whatever a client says.
STORE_VARIABLE = "NIGHTSHIFT_WEIGHT_STORE"


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Body of ``init_info``: a folder, or a weight server with its token."""

    root: str | None = None  # folder of the weight files, at or below the one the server was started with
    url: str | None = None  # address of the weight server's folder
    token: str = ""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Body of ``update_info``: one safetensors file with HF names."""

    path: str  # relative to the root, or absolute below it; with a weight server, the name there
    bytes: int | None = None  # size of the file
    digest: str | None = None  # BLAKE3 of the file, hex


class SafetensorsEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads whole-model safetensors files by vLLM's own layer-wise reload."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._root: Path | None = None
        self._source: pull.Source | None = None
        self._reloading = False
        self._updated = False
        self._expected: dict[str, weights.Shape] | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Takes the source of the weight files and the model's tensor names.

        Raises:
            WeightFileError: the folder is outside the weight store, or the weight server is none that this server may
                fetch from.
        """
        self._root = self._source = None
        if init_info.url is not None:
            self._source = pull.source(init_info.url, init_info.token)
        else:
            store = os.environ.get(STORE_VARIABLE)
            if not store:
                raise weights.WeightFileError(f"the server was started without {STORE_VARIABLE}")
            self._root = weights.narrow(Path(store), init_info.root)
        self._expected = weights.model_shapes(Path(self.model_config.model))

    def start_weight_update(self) -> None:
        """Opens an update. The model stays as it is until a file has been checked."""
        self._updated = False

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Checks and loads the file. Replaces the base class's method, which synchronises an accelerator."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Checks the file, then loads it.

        Raises:
            WeightFileError: the file is not to be loaded; the model is untouched.
            RuntimeError: loading broke off; layers hold old and new weights, so that a whole update must follow.
        """
        if self._updated:
            raise weights.WeightFileError("one update takes one file, a second one was sent")
        began = time.perf_counter()
        path = self._file(update_info)
        header = weights.read_header(path)
        if self._expected is not None:
            weights.check_tensors(header, self._expected, tied=self._tied)
        if self._source is None:  # what was fetched was checked then
            weights.check_content(path, update_info.bytes, update_info.digest)
        tensors = load_file(path)
        checked = time.perf_counter()
        self._updated = True
        initialize_layerwise_reload(self.model)
        self._reloading = True
        try:
            self.model.load_weights(tensors.items())
        except Exception as error:
            self._finalize()  # or the next request would run into layers without weights, which ends the engine
            raise RuntimeError(f"loading {path.name} broke off, the weights are mixed now: {error}") from error
        logger.info(
            "weights of %s: checked in %.3f s, loaded in %.3f s",
            path.name,
            checked - began,
            time.perf_counter() - checked,
        )

    def finish_weight_update(self) -> None:
        """Ends the reload. Without an accepted file there is nothing to end."""
        self._finalize()

    def shutdown(self) -> None:
        """Nothing is held between updates."""

    def _file(self, info: UpdateInfo) -> Path:
        if self._source is not None:
            file = pull.remote_file({"path": info.path, "bytes": info.bytes, "digest": info.digest})
            return pull.fetch(self._source, file, pull.cache_folder())
        if self._root is None:
            raise weights.WeightFileError("weights were sent before init_weight_transfer_engine")
        return weights.confine(self._root, info.path)

    @property
    def _tied(self) -> bool:
        return bool(getattr(self.model_config.hf_text_config, "tie_word_embeddings", False))

    def _finalize(self) -> None:
        if not self._reloading:
            return
        finalize_layerwise_reload(self.model, self.model_config)
        self._reloading = False
        if self._tied and self.device.type == "cpu":
            self._repack_tied_head()

    def _repack_tied_head(self) -> None:
        """Packs a tied head anew from the embedding.

        The CPU backend packs a copy of each linear layer's weights when the layer is loaded. A tied head is never
        loaded itself, so that without this its packed copy would stay that of the old weights.
        """
        modules = list(self.model.modules())
        heads = [m for m in modules if isinstance(m, ParallelLMHead)]
        embeddings = [m for m in modules if isinstance(m, VocabParallelEmbedding) and not isinstance(m, ParallelLMHead)]
        if not heads:
            return
        if len(heads) > 1 or len(embeddings) != 1:
            raise RuntimeError(f"cannot tell which of {len(embeddings)} embeddings {len(heads)} tied heads share")
        head = heads[0]
        head.weight = embeddings[0].weight
        head.quant_method.process_weights_after_loading(head)

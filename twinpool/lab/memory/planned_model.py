"""The model of a plan: its config, and what is known of its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from twinpool.core.errors import ConfigError
from twinpool.core.layout import DTYPE_BYTES
from twinpool.engine.model_config import ModelConfig, read_json
from twinpool.lab.memory.cache_shape import CacheShape
from twinpool.lab.memory.checkpoint_headers import StoredTensor, read_headers
from twinpool.lab.memory.model_fields import ModelFields
from twinpool.lab.memory.parameters import estimate_parameters
from twinpool.lab.memory.read_cache_shape import read_cache_shape
from twinpool.lab.memory.tensors import are_known, list_tensors
from twinpool.lab.memory.term import Kind, Term, TermName
from twinpool.lab.memory.weight_bits import weight_bits


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModel:
    """What a plan knows of a model.

    Attributes:
        stored: Its tensors on disk, by name; empty if they are not here.
        num_parameters: As told by whoever plans; None: to be found out.
    """

    config: ModelConfig
    shape: CacheShape  # as the architecture needs it
    stored: Mapping[str, StoredTensor] = field(default_factory=dict)
    num_parameters: int | None = None

    @property
    def fields(self) -> ModelFields:
        return ModelFields(self.config)

    @property
    def is_served(self) -> bool:
        """Whether our engine can run it."""
        return are_known(self.config)

    def cache_shape(self) -> CacheShape:
        """Return the shape in the engine that runs it: ours keeps all tokens of layers with a window too."""
        return self.shape.unwindowed() if self.is_served else self.shape

    def weights(self, *, dtype: str, num_ranks: int) -> Term:
        """Return what the weights take on the rank that keeps most.

        Raises:
            ModelError: A field that is needed is missing, or weights are stored in a way that is not known.
            ConfigError: Heads and ranks do not divide.
        """
        size = DTYPE_BYTES[dtype]
        if self.is_served:
            elements = max(self._rank_elements(rank, num_ranks) for rank in range(num_ranks))
            return _term(
                elements * size, Kind.EXACT, f"{elements:,} parameters in the shapes of {self.fields.family}"
            )
        if self.stored:
            whole = sum(
                tensor.num_elements * size if tensor.is_float else tensor.num_bytes
                for tensor in self.stored.values()
            )
            kind = Kind.EXACT if num_ranks == 1 else Kind.ESTIMATE
            return _term(-(-whole // num_ranks), kind, f"headers of {len(self.stored)} stored tensors")
        parameters = self.num_parameters or estimate_parameters(self.fields)
        bits = self._bits(8.0 * size)
        return _term(
            int(parameters * bits / 8) // num_ranks,
            Kind.ESTIMATE,
            f"{parameters:,} parameters "
            + ("as told" if self.num_parameters else "counted from sizes")
            + f", {bits:g} bits each",
        )

    def _rank_elements(self, rank: int, num_ranks: int) -> int:
        tensors = list_tensors(self.fields, rank=rank, num_ranks=num_ranks)
        return sum(tensor.rank_elements for tensor in tensors)

    def _bits(self, of_dtype: float) -> float:
        """Return the bits of one stored parameter."""
        quantization = self.config.part("quantization_config") or self.fields.config.part(
            "quantization_config"
        )
        return of_dtype if quantization is None else weight_bits(quantization)


def read_model(path: Path, *, num_parameters: int | None = None) -> PlannedModel:
    """Read a folder with a config.json, or the file alone.

    Args:
        path: The folder or the file.
        num_parameters: Of a model whose weights are neither here nor of a known family.

    Raises:
        ModelError: It cannot be read, or a field is missing or does not fit; the message names it.
    """
    file = path / "config.json" if path.is_dir() else path
    stored = read_headers(file.parent) if path.is_dir() else {}
    return model_of(read_json(file), stored=stored, num_parameters=num_parameters)


def model_of(
    fields: Mapping[str, object],
    *,
    stored: Mapping[str, StoredTensor] | None = None,
    num_parameters: int | None = None,
) -> PlannedModel:
    """Return the model of the fields of a config.json; else as ``read_model``."""
    if num_parameters is not None and num_parameters < 1:
        raise ConfigError("--parameters", f"{num_parameters} is less than 1")
    config = ModelConfig(fields)
    return PlannedModel(
        config=config, shape=read_cache_shape(config), stored=stored or {}, num_parameters=num_parameters
    )


def _term(num_bytes: int, kind: Kind, source: str) -> Term:
    return Term(name=TermName.WEIGHTS, num_bytes=num_bytes, kind=kind, source=source)

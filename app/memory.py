"""[pure] How much memory a rank will need: arithmetic over sizes and settings, before anything is built."""

from dataclasses import dataclass

from app.config import Config
from layercheck.commands.answer import size
from layercheck.errors import ConfigError
from layercheck.layers import MASTER_BYTES, VERSION_BYTES

_COPIES_IN_MEMORY = 2
_REDUCE_BUCKET = 500_000_000
_PREFETCH_BUCKET = 50_000_000
"""Elements; DeepSpeed's defaults."""
_TIGHT = 0.9


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Numbers of elements.

    Attributes:
        with_residuals: of the trainable layers that get residuals.
        largest_layer: counts what trains and what is frozen of one layer together.
    """

    params: int
    trainable: int
    with_residuals: int
    largest_layer: int
    num_layers: int
    hidden: int
    vocab: int


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes of one rank. `activations` is a rule of thumb, the rest is counted.

    Attributes:
        weights: this rank's part, in the dtype of the forward pass.
        gradients: this rank's part.
        optimizer: fp32 weights and moments of this rank's part of what trains.
        gathered: the largest layer and its gradient, whole, and what ZeRO-3 fetches ahead.
        buckets: where gradients are collected for their reduction.
        activations: of one micro-batch.
        staging: copies in flight to the storage, in host memory; at most this.
        bases: the newest versions' weights, from which residuals count, in host memory.
        vault: this rank's part of the memory tier, copies for another node included, in shared memory; about.
        vault_limit: most that all ranks of a host may put there, None if nobody said.
        offloaded: whether gradients and optimizer lie in host memory.
        on_device: whether there is a device beside the host.
    """

    weights: int
    gradients: int
    optimizer: int
    gathered: int
    buckets: int
    activations: int
    staging: int
    bases: int
    vault: int
    vault_limit: int | None
    offloaded: bool
    on_device: bool

    @property
    def device(self) -> int:
        """Bytes on the accelerator, 0 without one."""
        if not self.on_device:
            return 0
        here = self.weights + self.gathered + self.buckets + self.activations
        return here + (0 if self.offloaded else self.gradients + self.optimizer)

    @property
    def host(self) -> int:
        """Bytes in host memory."""
        if not self.on_device:
            here = self.certain + self.gathered + self.buckets + self.activations
        else:
            here = self.gradients + self.optimizer if self.offloaded else 0
        return here + self.staging + self.bases + self.vault

    @property
    def certain(self) -> int:
        """Bytes that cannot be avoided: weights, gradients, optimizer."""
        return self.weights + self.gradients + self.optimizer


def estimate(sizes: ModelSizes, config: Config, world_size: int) -> MemoryEstimate:
    """The memory of one rank.

    Activations follow Korthikanti et al. 2022 ("Reducing Activation Recomputation in Large Transformer
    Models", section 4, without the attention scores that fused attention does not keep): 34 bytes per token,
    hidden unit and layer in 16 bits; 2 with checkpointing, and one layer whole. The logits come on top.
    """
    train, on_device = config.train, config.cluster.gpus_per_worker > 0
    element = 2 if train.dtype == "bf16" else 4
    zero = train.deepspeed.get("zero_optimization", {})
    bucket = int(zero.get("reduce_bucket_size", _REDUCE_BUCKET))
    ahead = int(zero.get("stage3_prefetch_bucket_size", _PREFETCH_BUCKET))
    tokens = train.micro_batch * config.data.seq_len
    per_layer = 17 * element * tokens * sizes.hidden
    kept = element * tokens * sizes.hidden * sizes.num_layers + per_layer
    whole = per_layer * sizes.num_layers
    logits = tokens * sizes.vocab * 2 * (element + 4)  # and in fp32 for the loss; the gradient of each
    full = VERSION_BYTES * _share(sizes.trainable, world_size)
    return MemoryEstimate(
        weights=element * _share(sizes.params, world_size),
        gradients=element * _share(sizes.trainable, world_size),
        optimizer=full,
        gathered=element * (min(sizes.params, sizes.largest_layer + ahead) + sizes.largest_layer),
        # A host gives out memory when it is first touched.
        buckets=element * (bucket if on_device else min(bucket, sizes.trainable)),
        activations=logits + (kept if config.model.gradient_checkpointing else whole),
        staging=_staging(config, full),
        bases=MASTER_BYTES * _share(sizes.with_residuals, world_size),
        vault=_vault(config, full),
        vault_limit=_vault_limit(config),
        offloaded=train.offload,
        on_device=on_device,
    )


def _share(elements: int, world_size: int) -> int:
    return -(-elements // world_size)


def _staging(config: Config, full: int) -> int:
    if config.checkpoint.method != "layercheck":
        return 0
    return min(full, config.checkpoint.settings.staging_bytes or full)


def _vault(config: Config, full: int) -> int:
    """The newest copy of everything and the one being made, and as much for each copy on another node.

    With `k_ratio` above 0 it can be more: an event stays until each of its layers has a newer copy.
    """
    memory = config.checkpoint.settings.memory
    if config.checkpoint.method != "layercheck" or not memory.enabled:
        return 0
    needed, limit = _COPIES_IN_MEMORY * full * (1 + memory.replicas), _vault_limit(config)
    return needed if limit is None else min(needed, limit)


def _vault_limit(config: Config) -> int | None:
    budget_gb = config.checkpoint.settings.memory.budget_gb
    return None if budget_gb is None else int(budget_gb * 1e9)


def describe(needed: MemoryEstimate, sizes: ModelSizes, world_size: int) -> str:
    """One line for a person."""
    parts = {
        "weights": needed.weights,
        "gradients": needed.gradients,
        "optimizer": needed.optimizer,
        "largest layer gathered": needed.gathered,
        "buckets": needed.buckets,
        "activations about": needed.activations,
        "staging up to": needed.staging,
        "copies for residuals": needed.bases,
        "memory tier about": needed.vault,
    }
    text = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in parts.items())
    where = f"{size(needed.device)} of the device and " if needed.on_device else ""
    return (
        f"memory of a rank of {world_size}, {sizes.params / 1e6:.1f} M parameters, "
        f"{sizes.trainable / 1e6:.1f} M train: {text}; about {where}{size(needed.host)} of the host"
    )


def check(
    needed: MemoryEstimate, device_bytes: int | None, host_bytes: int, ranks_on_host: int
) -> str | None:
    """Compares with the memory that there is.

    Args:
        needed: of one rank.
        device_bytes: all memory of the rank's accelerator, None without one.
        host_bytes: all memory of the host.
        ranks_on_host: ranks that share it.

    Returns:
        A warning, or None where there is room.

    Raises:
        ConfigError: even weights, gradients and optimizer alone are larger than the memory.
    """
    warning = None
    for kind, certain, whole, have in _places(needed, device_bytes, host_bytes, ranks_on_host):
        if certain > have:
            raise ConfigError(
                f"the {kind} has {size(have)}; weights, gradients and optimizer state alone take "
                f"{size(certain)}: raise cluster.workers, set train.offload=true (device) or "
                "model.lora, or choose a smaller model",
                need=certain,
                have=have,
            )
        if whole > _TIGHT * have:
            warning = (
                f"memory may not be enough: about {size(whole)} of {size(have)} of the {kind} are needed; "
                "model.gradient_checkpointing, a smaller train.micro_batch or data.seq_len, and "
                "checkpoint.settings.staging_bytes, residual.exclude or memory.budget_gb (host) lower it"
            )
    return warning


def _places(
    needed: MemoryEstimate, device_bytes: int | None, host_bytes: int, ranks: int
) -> list[tuple[str, int, int, int]]:
    """(name, bytes that are certain, bytes in all, bytes there are) of each memory."""
    moved = needed.gradients + needed.optimizer if needed.offloaded or not needed.on_device else 0
    on_host = moved + (0 if needed.on_device else needed.weights)
    # Staging takes at most a quarter of what is free, unless `staging_bytes` says more; the memory tier half
    # of the shared memory (as a rule half of the host's), unless `budget_gb` says more or less.
    limit = host_bytes // 4 if needed.vault_limit is None else needed.vault_limit
    limited = min(ranks * needed.staging, host_bytes // 4) + min(ranks * needed.vault, limit)
    on_host_in_all = ranks * (needed.host - needed.staging - needed.vault) + limited
    places = [("host", ranks * on_host, on_host_in_all, host_bytes)]
    if needed.on_device and device_bytes is not None:
        places.insert(0, ("device", needed.certain - moved, needed.device, device_bytes))
    return places

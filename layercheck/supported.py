"""Which engines a session can protect: those whose every update the hooks see."""

from typing import Any

import torch

from layercheck.errors import EngineRefusedError


def refuse_unsupported(engine: Any) -> None:
    """Looks at what `deepspeed.initialize` returned.

    Raises:
        EngineRefusedError: names the feature that hides updates.
    """
    zero = engine.optimizer
    stage = engine.zero_optimization_stage() if hasattr(engine, "zero_optimization_stage") else None
    if stage != 3:
        raise EngineRefusedError(
            f"ZeRO stage {stage}: LayerCheck needs zero_optimization.stage = 3", stage=stage
        )
    inner = getattr(zero, "optimizer", None)
    reasons = {
        "NVMe offload": zero.swap_optimizer or zero.params_in_nvme_and_cpu,
        "Twin-Flow (offload ratio below 1)": zero.offload_optimizer and zero.partial_offload < 1,
        "ZenFlow": bool(zero.zenflow),
        "SuperOffload": engine.super_offload(),
        "hpZ (zero_hpz_partition_size above 1)": engine.zero_hpz_partition_size() > 1,
        "MiCS": any(
            param.ds_zero_partition_world_size != torch.distributed.get_world_size()
            for param in engine.module.parameters()
        ),
        "tensor or pipeline parallelism": engine.mp_world_size > 1 or bool(engine.pipeline_parallelism),
        "an optimizer that is no torch.optim.Optimizer": not isinstance(inner, torch.optim.Optimizer),
        "Muon": getattr(zero, "use_muon", False),
    }
    for reason, present in reasons.items():
        if present:
            raise EngineRefusedError(f"{reason} is not supported: its updates would not be seen", kind=reason)

"""The paper's own figures as costs (Qwen2.5-7B on OpenThoughts, 8 x A100-40GB, Lustre), read together.

A step of 4.2 s; LayerCheck: 10 s of recovery and the stall share of 7.2 % that the reported 92.3 % at 0.5 h
needs (the measured shares, 10.7 to 12.0 %, belong to a decision at every step and do not give 92.3 %);
GEMINI: 106 steps, 14 s a checkpoint, 14 s to load; LowDiff: 9.3 % and 34 s. Recoveries are without
detection, restart and reconstruction, which the paper leaves out.
"""

from simulations.costs import Costs, LayerCosts, MethodCosts, RecoveryCosts

T_ITER_S = 4.2
_INTERVAL = 106
_BLOCKS, _BLOCK_NUMEL, _EMBEDDING_NUMEL = 28, 233_057_792, 152_064 * 3_584


def paper_costs() -> Costs:
    """The preset `paper`."""
    return Costs(
        format_version=1,
        title="the paper's figures, read together (labelled preset, not measured here)",
        t_iter_s=T_ITER_S,
        gpus=8,
        machine="8 x A100-40GB, Lustre",
        model="Qwen2.5-7B",
        full_bytes=91_400_000_000,
        methods={
            "layercheck": MethodCosts(
                source="paper",
                commits="every_step",
                stall_s=0.325,
                recovery=RecoveryCosts(load_s=10.0),
                layers=_layers(),
                s_max_steps=400,
                note="stall: 7.2 % of the time, what 92.3 % at 0.5 h needs; every layer at the mean interval",
            ),
            "lowdiff": MethodCosts(
                source="paper",
                commits="every_step",
                stall_s=T_ITER_S * 0.093 / (1 - 0.093),
                recovery=RecoveryCosts(load_s=34.0),
                note="9.3 % of the time; without reconstruction",
            ),
            "gemini": MethodCosts(
                source="paper",
                commits="interval",
                stall_s=14.07,
                interval_steps=_INTERVAL,
                recovery=RecoveryCosts(load_s=14.0),
                far_every=24,
                far_kinds=("cluster",),
                note="at the matched interval; stored every 24 commits (3 h), for the loss of peers",
            ),
        },
    )


def _layers() -> tuple[LayerCosts, ...]:
    sizes = {f"layers.{index}": _BLOCK_NUMEL for index in range(_BLOCKS)}
    sizes = {"embed_tokens": _EMBEDDING_NUMEL, **sizes, "norm": 3_584, "lm_head": _EMBEDDING_NUMEL}
    return tuple(LayerCosts(name=name, numel=n, interval_steps=_INTERVAL) for name, n in sizes.items())

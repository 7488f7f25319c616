"""A micro Qwen2 under ZeRO-3; data, dropout and learning rate of a step depend on its number alone."""

from typing import Any

import deepspeed
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import layercheck

VOCAB = 128
SEQ = 16
GLOBAL_BATCH = 30


def build(
    seed: int = 0,
    *,
    groups: str = "layer",
    sub_group_size: int = 5000,
    lr: float = 1e-3,
    tied: bool = True,
    accumulation: int = 1,
    optimizer: Any = None,
    persistence: int = 1000,
    freeze: tuple[str, ...] = (),
    train: tuple[str, ...] = ("",),
    hidden: int = 36,
    zero: dict[str, Any] | None = None,
    dtype: str = "bf16",
) -> Any:
    """A DeepSpeed engine of a 3-block model.

    `groups` are `layer`, `stock` (matrices, vectors) or `one`. `freeze` are name parts of parameters that do
    not train, `train` of those that may. With `hidden` 30 parameters have padding at 3 and 4 ranks. `zero`
    are further settings of DeepSpeed's `zero_optimization`; `dtype` is bf16 or fp32.
    """
    world = torch.distributed.get_world_size()
    settings = {
        "train_micro_batch_size_per_gpu": GLOBAL_BATCH // world // accumulation,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": sub_group_size,
            "stage3_param_persistence_threshold": persistence,
            **(zero or {}),
        },
        "bf16": {"enabled": dtype == "bf16"},
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
    }
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=50,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=1,
        attention_dropout=0.1,
        tie_word_embeddings=tied,
        use_cache=False,
    )
    with deepspeed.zero.Init(config_dict_or_path=settings):
        model = Qwen2ForCausalLM(config)
    for name, param in model.named_parameters():
        if any(part in name for part in freeze) or not any(part in name for part in train):
            param.requires_grad = False
    if groups == "layer":
        parameters: Any = layercheck.layer_groups(model, 0.01)
    else:
        parameters = [param for param in model.parameters() if param.requires_grad]
    if groups == "stock":
        kinds = [[param for param in parameters if (len(param.ds_shape) > 1) == k] for k in (True, False)]
        parameters = [
            {"params": kind, "weight_decay": decay} for kind, decay in zip(kinds, (0.01, 0.0), strict=True)
        ]
    make = optimizer or (lambda params: torch.optim.AdamW(params, lr=lr))
    engine, *_ = deepspeed.initialize(model=model, optimizer=make(parameters), config=settings)
    return engine


def train_step(engine: Any, step: int, seed: int = 0) -> float:
    """One optimizer step; the global batch of a step is the same at every world size."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    generator = torch.Generator().manual_seed(1000 * seed + step)
    tokens = torch.randint(0, VOCAB, (GLOBAL_BATCH, SEQ), generator=generator)
    mine = tokens[rank * GLOBAL_BATCH // world : (rank + 1) * GLOBAL_BATCH // world]
    for group in engine.optimizer.optimizer.param_groups:
        group["lr"] = 1e-3 * (0.5 + 0.5 * (1 - step / 200))
    accumulation = engine.gradient_accumulation_steps()
    losses = []
    for micro, batch in enumerate(mine.chunk(accumulation)):
        torch.manual_seed(7919 * step + 31 * rank + micro)
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach().float())
    mean = torch.stack(losses).mean()
    torch.distributed.all_reduce(mean)
    return float(mean / world)

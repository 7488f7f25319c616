"""A random Llama under ZeRO-3 on one rank, and steps that depend on their number alone."""

from dataclasses import dataclass, replace
from typing import Any

import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import layercheck

LLAMA_3_2_1B = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rope_theta": 500000.0,
}
MICRO = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


@dataclass(frozen=True)
class Size:
    """A model, and the tokens of one step: accumulation x micro_batch x sequence."""

    model: dict[str, Any]
    sequence: int
    micro_batch: int
    accumulation: int = 1
    lr: float = 1e-5


BIG = Size(LLAMA_3_2_1B, sequence=2048, micro_batch=4, accumulation=4)
TINY = replace(BIG, model=MICRO, sequence=16, micro_batch=2, accumulation=2, lr=1e-3)


def build(size: Size, seed: int) -> Any:
    """The engine; `seed` makes the weights."""
    settings = {
        "train_micro_batch_size_per_gpu": size.micro_batch,
        "gradient_accumulation_steps": size.accumulation,
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
    }
    torch.manual_seed(seed)
    config = LlamaConfig(**size.model, tie_word_embeddings=True, attention_dropout=0.1, use_cache=False)
    with deepspeed.zero.Init(config_dict_or_path=settings):
        model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(layercheck.layer_groups(model, 0.1), lr=size.lr)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    return engine


def train_step(engine: Any, size: Size, step: int) -> float:
    """One optimizer step on random tokens; data and dropout are functions of the step. Returns its loss."""
    generator = torch.Generator().manual_seed(step)
    shape = (size.accumulation, size.micro_batch, size.sequence)
    tokens = torch.randint(0, size.model["vocab_size"], shape, generator=generator)
    loss = torch.zeros(())
    for micro, batch in enumerate(tokens.to(engine.device)):
        torch.manual_seed(7919 * step + micro)
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
    return float(loss)

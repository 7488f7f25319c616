"""Stands in for `peft`, which these tests do without: the calls that the app makes, and peft's own names.

Names as peft gives them: `base_model.model.<module>.base_layer.weight`, `...lora_A.default.weight`.
"""

import math
import sys
from typing import Any

import torch
from torch import nn


class LoraConfig:
    def __init__(
        self, task_type: str, r: int, lora_alpha: float, lora_dropout: float, target_modules: str | list[str]
    ) -> None:
        assert task_type == "CAUSAL_LM"
        self.r, self.lora_alpha, self.lora_dropout = r, lora_alpha, lora_dropout
        self.target_modules = target_modules


class _Linear(nn.Module):
    def __init__(self, base: nn.Linear, config: LoraConfig) -> None:
        super().__init__()
        self.base_layer = base
        dtype = base.weight.dtype  # with autocast_adapter_dtype=False
        down = nn.Linear(base.in_features, config.r, bias=False, dtype=dtype)
        up = nn.Linear(config.r, base.out_features, bias=False, dtype=dtype)
        nn.init.kaiming_uniform_(down.weight, a=math.sqrt(5))
        nn.init.zeros_(up.weight)
        self.lora_dropout = nn.ModuleDict({"default": nn.Dropout(config.lora_dropout)})
        self.lora_A, self.lora_B = nn.ModuleDict({"default": down}), nn.ModuleDict({"default": up})
        self.scaling = config.lora_alpha / config.r

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added = self.lora_B["default"](self.lora_A["default"](self.lora_dropout["default"](x)))
        return self.base_layer(x) + added * self.scaling


class LoraModel(nn.Module):
    def __init__(self, model: nn.Module, config: LoraConfig) -> None:
        super().__init__()
        self.model = model
        for param in model.parameters():
            param.requires_grad = False
        fitting = [name for name, module in model.named_modules() if _fits(name, module, config)]
        if not fitting:
            raise ValueError(f"Target modules {config.target_modules} not found in the base model")
        for name in fitting:
            parent = model.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], _Linear(model.get_submodule(name), config))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.model, name)

    def forward(self, **inputs: Any) -> Any:
        return self.model(**inputs)


def _fits(name: str, module: nn.Module, config: LoraConfig) -> bool:
    if not isinstance(module, nn.Linear) or name.endswith("lm_head"):
        return False
    return config.target_modules == "all-linear" or name.rpartition(".")[2] in config.target_modules


class PeftModel(nn.Module):
    def __init__(self, model: nn.Module, config: LoraConfig) -> None:
        super().__init__()
        self.base_model = LoraModel(model, config)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_model, name)

    def forward(self, **inputs: Any) -> Any:
        return self.base_model(**inputs)

    def save_pretrained(self, folder: str, state_dict: dict[str, torch.Tensor]) -> None:
        from safetensors.torch import save_file

        assert all(".lora_" in name for name in state_dict), "adapters only"
        plain = {name.replace(".default", ""): tensor.contiguous() for name, tensor in state_dict.items()}
        save_file(plain, f"{folder}/adapter_model.safetensors")


def get_peft_model(model: nn.Module, config: LoraConfig, *, autocast_adapter_dtype: bool) -> PeftModel:
    assert not autocast_adapter_dtype, "DeepSpeed refuses fp32 adapters beside bf16 weights"
    return PeftModel(model, config)


def install() -> None:
    """From now on the app uses this. (In `sys.modules` transformers would take it for the real one.)"""
    from app import adapters

    adapters._peft = lambda: sys.modules[__name__]  # type: ignore[assignment]

"""The section `model` of a configuration."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from app.section import PlaceOrName, Section


class LoraConfig(Section):
    """Adapters of low rank beside frozen weights; needs the package `peft` (extra `lora`)."""

    r: int = Field(8, ge=1)
    """Rank of an adapter."""
    alpha: float = Field(16, gt=0)
    """The adapter's output is scaled by alpha / r."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Before an adapter."""
    targets: str | tuple[str, ...] = "all-linear"
    """Modules that get one: the ends of their names (`["q_proj", "v_proj"]`), or `all-linear`."""


class ModelConfig(Section):
    """A pretrained model (`path`) or a fresh one (`config`), and its tokenizer."""

    path: PlaceOrName | None = None
    """Local folder or hub id."""
    config: dict[str, Any] | None = None
    """Keys of a Hugging Face `config.json`; needs `model_type`. `vocab_size` follows the tokenizer."""
    tokenizer: PlaceOrName | None = None
    """`bundled`, a folder or a hub id. Default: that of `path`, else `bundled`."""
    chat_template: PlaceOrName | None = None
    """`chatml` or a Jinja file. Default: the tokenizer's own; one without any is refused."""
    vocab_size: int = Field(2048, ge=300)
    """Size of the bundled tokenizer."""
    dropout: float | None = Field(None, ge=0, lt=1)
    """Replaces every dropout of the model; null leaves them."""
    freeze: tuple[str, ...] = ()
    """Names of layers or parameters that do not train, with wildcards: `["embed_tokens", "layers.[0-3]"]`."""
    lora: LoraConfig | None = None
    """Train adapters by `peft` instead of the weights."""
    gradient_checkpointing: bool = False
    """Computes activations again in the backward pass: less memory, more time."""
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    """Implementation of attention."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.path is None) == (self.config is None):
            raise ValueError("give exactly one of model.path (pretrained) and model.config (fresh model)")
        if self.config is not None and "model_type" not in self.config:
            raise ValueError(f"model.config={self.config!r} needs the key model_type, such as qwen2")
        return self

    @property
    def tokenizer_name(self) -> str:
        """Where the tokenizer comes from."""
        return self.tokenizer or self.path or "bundled"

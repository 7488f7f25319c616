"""The configuration of the model: read or made, and checked against its tokenizer and its data."""

from typing import Any

from transformers import AutoConfig

from app.config import Config
from app.model_config import ModelConfig
from layercheck.errors import ConfigError

_DROPOUT_KEYS = (
    "attention_dropout", "hidden_dropout", "dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"
)  # fmt: skip
_PACKED_KINDS = {"full_attention", "sliding_attention"}


def model_shape(config: Config, tokenizer: Any) -> Any:
    """The Hugging Face configuration of a run's model.

    Raises:
        ConfigError: it cannot be read or made, or does not fit the tokenizer or the length of the sequences.
    """
    model = config.model
    if model.path is None:
        shape = _fresh_shape(model, tokenizer)
    else:
        try:
            shape = AutoConfig.from_pretrained(model.path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"model.path={model.path!r} cannot be loaded: {error}") from None
    check_vocabulary(shape, tokenizer, repr(model.tokenizer_name))
    _check_length(shape, config.data.seq_len)
    _check_attention(shape)
    return _with_dropout(shape, model)


def _fresh_shape(model: ModelConfig, tokenizer: Any) -> Any:
    assert model.config is not None
    settings = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        **model.config,
    }
    try:
        return AutoConfig.for_model(settings.pop("model_type"), **settings)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"model.config={model.config!r}: {error}") from None


def check_vocabulary(shape: Any, tokenizer: Any, what: str) -> None:
    """Refuses a tokenizer with ids that the model has no embedding for.

    Args:
        shape: the model's configuration.
        tokenizer: the tokenizer.
        what: names the tokenizer in the error.

    Raises:
        ConfigError: names both sizes.
    """
    size = shape.get_text_config().vocab_size
    if len(tokenizer) > size:
        raise ConfigError(
            f"the tokenizer {what} has {len(tokenizer)} tokens, the model only {size}: change "
            "model.tokenizer, model.vocab_size or model.config.vocab_size"
        )


def position_limit(shape: Any) -> int | None:
    """The most tokens that the model was made for; None if its configuration names no limit."""
    limit = getattr(shape.get_text_config(), "max_position_embeddings", None)
    return int(limit) if limit else None


def _check_length(shape: Any, seq_len: int) -> None:
    limit = position_limit(shape)
    if limit is not None and seq_len > limit:
        raise ConfigError(
            f"data.seq_len={seq_len} is above the {limit} positions that the model sees: lower data.seq_len, "
            "or choose another model"
        )


def _check_attention(shape: Any) -> None:
    """A layer that is no attention over a mask would carry one packed document into the next."""
    foreign = set(getattr(shape.get_text_config(), "layer_types", None) or ()) - _PACKED_KINDS
    if foreign:
        raise ConfigError(
            f"the model ({shape.model_type}) has layers of the kinds {sorted(foreign)}, which no mask "
            f"keeps from looking across documents; known are {sorted(_PACKED_KINDS)}: choose another model"
        )


def _with_dropout(shape: Any, model: ModelConfig) -> Any:
    if model.dropout is not None:
        for key in _DROPOUT_KEYS:
            if hasattr(shape, key):
                setattr(shape, key, model.dropout)
    return shape

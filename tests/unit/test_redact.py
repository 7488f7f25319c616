"""What must never be written beside a run."""

import pytest

from layercheck.redact import HIDDEN, without_secrets

SECRET = "hunter2-hunter2"


@pytest.mark.parametrize(
    "config",
    [
        {"hf_token": SECRET},
        {"model": {"hub": {"api_key": SECRET}}},
        {"headers": [{"Authorization": "x", "auth": SECRET}]},
        {"aws_secret_access_key": SECRET},
        {"storage": f"s3://me:{SECRET}@bucket/runs?region=x"},
        {"storage": f"abfs://box@account/runs?sas_token={SECRET}"},
        {"data": f"https://host/x?sig={SECRET}&v=1"},
        {"note": f"export KEY={SECRET}"},
        {"args": ("--key", SECRET)},
    ],
)
def test_no_secret_survives_wherever_it_stands(config: dict[str, object]) -> None:
    cleaned = without_secrets(config, {"MY_API_KEY": SECRET})
    assert SECRET not in repr(cleaned)
    assert HIDDEN in repr(cleaned)


def test_what_is_no_secret_stays_as_it_is() -> None:
    config = {
        "max_tokens": 4096,
        "tokenizer": "Qwen/Qwen2",
        "eos_token_id": 2,
        "storage": "s3://bucket/runs?region=eu&endpoint_override=host:9000",
        "path": "/shared/runs",
        "token": "",
        "lr": 1e-5,
        "none": None,
    }
    assert without_secrets(config, {"HF_TOKEN": "short", "HOME": "/shared/runs"}) == config

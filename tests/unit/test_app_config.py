from pathlib import Path

import pytest

from app.config import CONFIGS, Config, load_config, parse
from app.sources import check_source
from layercheck.errors import ConfigError


def test_every_number_of_workers_that_ray_may_start_has_to_split_the_global_batch() -> None:
    elastic = load_config("tiny", ["cluster.workers=2", "cluster.min_workers=1"])
    assert elastic.cluster.fewest_workers == 1
    assert [elastic.train.accumulation(n) for n in (1, 2)] == [4, 2]
    with pytest.raises(
        ConfigError, match=r"global_batch=12 cannot be split over 3 workers.*\[1, 2, 4\].*min_work"
    ):
        load_config("tiny", ["cluster.workers=4", "cluster.min_workers=2"])
    with pytest.raises(ConfigError, match=r"cluster\.min_workers=3 is above cluster\.workers=2"):
        load_config("tiny", ["cluster.min_workers=3"])


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.yaml")))
def test_every_shipped_configuration_is_valid_and_survives_its_own_dump(name: str) -> None:
    config = load_config(name)
    assert config.run.name == name
    assert Config.model_validate(config.resolved()) == config


@pytest.mark.parametrize("name", ["llama-3.2-1b", "qwen2.5-3b", "qwen2.5-7b"])
def test_the_runs_of_the_paper_have_its_settings(name: str) -> None:
    config = load_config(name)
    train = config.train
    assert (config.cluster.workers, config.cluster.gpus_per_worker, config.data.seq_len) == (8, 1, 2048)
    assert (train.micro_batch, train.accumulation(8), train.lr, train.clip, train.epochs) == (
        1,
        2,
        1e-5,
        1,
        1,
    )
    assert (train.dtype, config.model.gradient_checkpointing) == ("bf16", True)


def test_overrides_are_typed_by_yaml_and_the_last_one_wins() -> None:
    config = load_config(
        "tiny",
        [
            "train.steps=5",
            "train.steps=7",
            "train.betas=[0.8, 0.9]",
            "checkpoint.settings.s_max=60",
            "faults.kill=[{rank: 1, step: 3}]",
        ],
    )
    assert config.train.steps == 7
    assert config.train.betas == (0.8, 0.9)
    assert config.checkpoint.settings.s_max == 60
    assert config.faults.kill == ({"rank": 1, "step": 3},)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.stepz=5", r"unknown key 'train\.stepz' \(value 5\)"),
        ("checkpoint.settings.smax=5", r"checkpoint\.settings\.smax"),
        ("train.lr=-1", r"train\.lr=-1"),
        ("train.epochs=2", r"exactly one of train\.steps=90 and train\.epochs=2"),
        ("train.warmup_ratio=0.1", r"lr_warmup_steps=5 or train\.warmup_ratio=0\.1"),
        ("model.path=some/model", r"exactly one of model\.path"),
        ("model.config={hidden_size: 8}", "model_type"),
        ("cluster.workers=5", r"5 workers.*\[1, 2, 4\]"),
        ("run.name=a/b", r"run\.name='a/b'"),
        ("run.storage=s3://bucket/runs", r"data\.cache"),
        ("checkpoint.settings.warmup_full_every=45", r"warmup_full_every=45"),
        ("train.steps", "must look like"),
        ("train.steps.more=1", "not a section"),
        ("train.steps=[", "not YAML"),
    ],
)
def test_a_wrong_setting_is_one_error_that_names_value_and_knob(override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        load_config("tiny", [override])
    assert not caught.value.retry_may_help


def test_a_configuration_that_does_not_exist_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no configuration 'huge'.*quickstart.*tiny"):
        load_config("huge")
    with pytest.raises(ConfigError, match="absent"):
        load_config(str(tmp_path / "absent.yaml"))


def test_a_yaml_file_is_read_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("model: {path: some/model}\ntrain: {epochs: 1, global_batch: 4}\n")
    config = load_config(str(path))
    assert config.model.tokenizer_name == "some/model"


def test_the_run_folder_is_absolute_and_a_uri_stays_a_uri(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config("tiny").run.folder == f"{tmp_path}/runs/tiny"
    assert load_config("tiny", [f"run.storage=file://{tmp_path}/x"]).run.folder == f"{tmp_path}/x/tiny"
    remote = load_config("tiny", ["run.storage=s3://bucket/runs/", "data.cache=/shared"])
    assert remote.run.folder == "s3://bucket/runs/tiny"


def test_a_configuration_means_the_same_places_wherever_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's workers have folders of their own: a relative storage once lay there, and was lost with them."""
    (tmp_path / "driver").mkdir()
    (tmp_path / "driver" / "rows.jsonl").touch()
    (tmp_path / "driver" / "model").mkdir()
    monkeypatch.chdir(tmp_path / "driver")
    given = ["data.source=rows.jsonl", "data.cache=cache", "model.path=model", "model.config=null"]
    driver = load_config("tiny", [*given, "faults.witness=seen", "faults.step_log=~/log"])
    monkeypatch.chdir(tmp_path)
    worker = parse(driver.resolved())
    assert worker == driver
    assert worker.run.storage == f"{tmp_path}/driver/runs"
    assert worker.data_folder == tmp_path / "driver" / "cache"
    assert (worker.data.source, worker.model.path) == (
        f"{tmp_path}/driver/rows.jsonl", f"{tmp_path}/driver/model"
    )  # fmt: skip
    assert worker.faults.witness == f"{tmp_path}/driver/seen"
    assert worker.faults.step_log == str(Path.home() / "log")


def test_a_name_of_the_hub_is_not_taken_for_a_path() -> None:
    config = load_config("tiny", ["data.source=some/set", "model.path=some/model", "model.config=null"])
    assert (config.data.source, config.model.path) == ("some/set", "some/model")


def test_what_is_called_like_a_folder_here_keeps_its_meaning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("some/set", "bundled", "chatml", "own"):
        (tmp_path / name).mkdir(parents=True)
    names = ["model.tokenizer=bundled", "model.chat_template=chatml"]
    for source in ("some/set", "bundled"):
        config = load_config("tiny", [f"data.source={source}", *names])
        assert config.data.source == source
        assert (config.model.tokenizer, config.model.chat_template) == ("bundled", "chatml")
    with pytest.raises(ConfigError, match=r"'some/set' is a folder in .* of the hub's"):
        check_source(load_config("tiny", ["data.source=some/set"]).data)
    # A model's folder is as good as its name, and transformers takes the folder first.
    assert load_config("tiny", ["model.tokenizer=own"]).model.tokenizer == f"{tmp_path}/own"


@pytest.mark.parametrize("key", ["data.source", "model.path", "model.tokenizer", "model.chat_template"])
def test_a_file_uri_is_a_path_where_a_name_may_stand_too(key: str) -> None:
    config = load_config("tiny", ["model.config=null", "model.path=x", f"{key}=file:///data/there"])
    section, name = key.split(".")
    assert getattr(getattr(config, section), name) == "/data/there"


@pytest.mark.parametrize("value", ["''", "' '", "file://"])
@pytest.mark.parametrize("key", ["run.storage", "data.cache", "data.source", "model.tokenizer"])
def test_no_path_is_not_the_working_directory(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key}='.*': it is empty"):
        load_config("tiny", [f"{key}={value}"])

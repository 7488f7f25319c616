"""The settings of a training run: one complete, frozen, checked value. Unknown keys are errors."""

import re
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from app.baselines.settings import WRITE_LOCAL_FILES, BaselineSettings, Method
from app.model_config import ModelConfig
from app.section import FileOrName, Place, Section
from layercheck.config import LayerCheckConfig, describe
from layercheck.errors import ConfigError

S = TypeVar("S", bound=Section)
CONFIGS = Path(__file__).parent / "configs"


class RunConfig(Section):
    """Which run this is and where it is stored."""

    name: str = "run"
    """The same name in the same storage continues a run. Letters, digits, `.`, `_`, `-`."""
    storage: Place = Field("runs", validate_default=True)
    """Local folder or URI that every worker and the coordinator see; the run is `<storage>/<name>/`."""
    seed: int = Field(0, ge=0)
    """Of weights, data order and dropout; batches and masks are functions of (seed, step, rank)."""

    @field_validator("name")
    @classmethod
    def _plain_name(cls, value: str) -> str:
        # The name becomes a folder, an actor name and a part of URIs.
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", value):
            raise ValueError(f"run.name={value!r} may hold letters, digits, '.', '_' and '-' only")
        return value

    @property
    def folder(self) -> str:
        """The folder of the run; absolute or a URI."""
        return f"{self.storage_root}/{self.name}"

    @property
    def storage_root(self) -> str:
        """`storage` without a slash at its end."""
        return self.storage.rstrip("/")


class DataConfig(Section):
    """What to train on."""

    source: FileOrName = "bundled"
    """`bundled` (the language reference of this Python), a `.jsonl` or `.parquet` file, or a hub id."""
    schema_: Literal["auto", "openthoughts", "medqa", "medqa_hf", "bigbio_qa"] = Field("auto", alias="schema")
    """Of the rows; `auto` looks at the columns."""
    split: str = "train"
    """Of a hub data set."""
    system: Literal["keep", "merge", "drop"] = "keep"
    """System prompts: as they are, put before the first user turn (for templates without that role), or left
    out."""
    seq_len: int = Field(1024, ge=8)
    """Tokens of a sequence."""
    packing: bool = True
    """Several documents in one sequence, with their boundaries kept apart."""
    max_rows: int | None = Field(None, ge=1)
    """Use the first rows only."""
    streaming: bool = False
    """Rows are read while the run goes, in the order of the source, and the trainer state says where it is;
    nothing is tokenised ahead or kept on disk. Needs `train.steps`, and a source that is not bundled."""
    cache: Place | None = None
    """Folder for the tokenised data, seen by all ranks. Default: `<storage>/<run>/data`."""
    wait_s: float = Field(1800, gt=0)
    """How long ranks wait for rank 0 to tokenise or to look at the source, and a step for its data."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.streaming and self.source == "bundled":
            raise ValueError(
                "data.streaming=true with data.source='bundled', which is in memory anyway: name a file or a "
                "data set of the hub, or set data.streaming=false"
            )
        return self


class TrainConfig(Section):
    """Optimisation. A step is an optimizer step; sizes are sequences."""

    steps: int | None = Field(None, ge=1)
    """Length of the run; give this or `epochs`."""
    epochs: float | None = Field(None, gt=0)
    """Length of the run in passes over the data."""
    global_batch: int = Field(96, ge=1)
    """Sequences of a step, over all workers; kept at any number of them."""
    micro_batch: int = Field(1, ge=1)
    """Sequences that a worker computes at once."""
    lr: float = Field(1e-5, gt=0)
    """Largest learning rate."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """From `lr` to `lr * min_lr_ratio`."""
    lr_warmup_steps: int | None = Field(None, ge=0)
    """Steps in which the rate grows to `lr`; give this or `warmup_ratio`."""
    warmup_ratio: float | None = Field(None, ge=0, lt=1)
    """The same as a part of all steps."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Last learning rate over the largest."""
    weight_decay: float = Field(0.01, ge=0)
    """Of matrices; vectors have none."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Of AdamW."""
    eps: float = Field(1e-8, gt=0)
    """Of AdamW."""
    clip: float = Field(1.0, ge=0)
    """Largest gradient norm; 0 means no clipping."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """Of the weights in the forward pass; the optimizer keeps fp32."""
    offload: bool = False
    """Optimizer state and its update on the host (ZeRO-Offload), by DeepSpeed's CPU Adam."""
    groups: Literal["layer", "stock"] = "layer"
    """Optimizer groups: one pair per layer, or one pair in all as without LayerCheck."""
    deepspeed: dict[str, Any] = Field(default_factory=dict)
    """More DeepSpeed keys (`zero_optimization: {sub_group_size: ...}`), laid over those of the app."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(f"give exactly one of train.steps={self.steps} and train.epochs={self.epochs}")
        if self.lr_warmup_steps is not None and self.warmup_ratio is not None:
            raise ValueError(
                f"give train.lr_warmup_steps={self.lr_warmup_steps} or "
                f"train.warmup_ratio={self.warmup_ratio}, not both"
            )
        return self

    def total_steps(self, num_sequences: int) -> int:
        """Number of the last step."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return max(1, int(self.epochs * num_sequences) // self.global_batch)

    def accumulation(self, world_size: int) -> int:
        """Micro-batches per step and rank.

        Raises:
            ConfigError: the global batch cannot be kept at this world size; lists the sizes that work.
        """
        if self.global_batch % (world_size * self.micro_batch):
            most = self.global_batch // self.micro_batch
            works = [n for n in range(1, most + 1) if self.global_batch % (n * self.micro_batch) == 0]
            raise ConfigError(
                f"train.global_batch={self.global_batch} cannot be split over {world_size} workers in "
                f"micro-batches of {self.micro_batch}; cluster.workers may be {works or 'none'} (from "
                "cluster.min_workers on, all of them): change it, train.micro_batch or train.global_batch",
                works=works,
            )
        return self.global_batch // (world_size * self.micro_batch)


class CheckpointConfig(Section):
    """How the run is protected: by LayerCheck, by one of the methods it is compared with, or not (`none`)."""

    method: Method = "layercheck"
    """What protects the run; the other methods are there for comparison, see below."""
    settings: LayerCheckConfig = LayerCheckConfig()
    """LayerCheck's. Of these the other methods heed `storage_wait_s`, `hang_s` and `metrics_flush_s`."""
    baseline: BaselineSettings = BaselineSettings()
    """Those of the other methods."""


class ClusterConfig(Section):
    """What Ray Train gets."""

    workers: int = Field(2, ge=1)
    """Ranks of the run."""
    min_workers: int | None = Field(None, ge=1)
    """Go on with as few as these when nodes are lost, and with more when they are back; None: never."""
    resize_check_s: float = Field(60, ge=0)
    """Seconds between looks for nodes that came back, with `min_workers`; growing restarts the workers."""
    cpus_per_worker: float = Field(1, gt=0)
    """CPUs that Ray reserves for each."""
    gpus_per_worker: float = Field(0, ge=0)
    """GPUs that Ray reserves for each; 0 trains on CPUs."""
    max_failures: int = Field(3, ge=-1)
    """Restarts of the worker group; -1 means no limit."""
    max_preemption_failures: int = Field(-1, ge=-1)
    """Restarts after Ray took nodes away that it had announced; they have a budget of their own."""
    on_signal: Literal["end", "restart"] = "end"
    """After a signal of `checkpoint.settings.preemption_signals` and the last save: `end` the run with status
    `preempted`, to be submitted again, or have the group restarted at once (counts in `max_failures`)."""
    reschedule_wait_s: float = Field(1800, gt=0)
    """How long a run waits for a cluster that has too little room for its workers."""
    backend: Literal["gloo", "nccl"] | None = None
    """Default: nccl with GPUs, else gloo."""
    health_check_s: float = Field(0.3, gt=0)
    """How often Ray Train looks after its workers."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min_workers is not None and self.min_workers > self.workers:
            raise ValueError(
                f"cluster.min_workers={self.min_workers} is above cluster.workers={self.workers}"
            )
        return self

    @property
    def fewest_workers(self) -> int:
        """The smallest world size that the run may have."""
        return self.workers if self.min_workers is None else self.min_workers

    @property
    def process_group(self) -> str:
        """Backend of torch.distributed."""
        return self.backend or ("nccl" if self.gpus_per_worker else "gloo")


class FaultsConfig(Section):
    """Failures to inject, for tests and demonstrations."""

    kill: tuple[dict[str, int | str], ...] = ()
    """`[{rank, step, times, how}]`, see `cluster/faults.py`; `how` is kill, raise or stop."""
    witness: Place | None = None
    """Local folder in which every rank notes what its state really was, see `cluster/witness.py`."""
    step_log: Place | None = None
    """Local folder in which rank 0 notes when each step began and ended, see `app/step_log.py`."""


class LoggingConfig(Section):
    """Where the curves of a run go, beside the metrics of its store."""

    tensorboard: bool = False
    """Event files in `<run>/tensorboard/` (of a run in a local folder)."""
    wandb: str | None = None
    """Project of Weights & Biases; needs the package `wandb` and its login."""


class Config(Section):
    """All settings of one run."""

    run: RunConfig = RunConfig()
    model: ModelConfig
    data: DataConfig = DataConfig()
    train: TrainConfig
    checkpoint: CheckpointConfig = CheckpointConfig()
    cluster: ClusterConfig = ClusterConfig()
    faults: FaultsConfig = FaultsConfig()
    logging: LoggingConfig = LoggingConfig()
    export: bool = True
    """Hand the trained model to Ray as its last Checkpoint, a folder that `from_pretrained` reads."""
    report_every_s: float = Field(5, gt=0)
    """Seconds between progress lines and reports to Ray (each one waits for all ranks)."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        # Not only the sizes that are wanted: Ray may start any number between them, in the middle of a run.
        for workers in range(self.cluster.fewest_workers, self.cluster.workers + 1):
            self.train.accumulation(workers)
        method = self.checkpoint.method
        if self.train.groups == "stock" and method != "none":
            raise ValueError(
                f"train.groups='stock' mixes layers, which checkpoint.method={method!r} cannot tell apart: "
                "use train.groups=layer, or checkpoint.method=none"
            )
        if self.cluster.fewest_workers != self.cluster.workers and method not in ("layercheck", "none"):
            raise ValueError(
                f"cluster.min_workers={self.cluster.min_workers}: what checkpoint.method={method!r} saves is "
                "read by as many workers as wrote it; use min_workers=null, or checkpoint.method=layercheck"
            )
        if method in WRITE_LOCAL_FILES and "://" in self.run.storage_root:
            raise ValueError(
                f"run.storage={self.run.storage!r}: checkpoint.method={method!r} writes plain files, give it "
                "a local folder"
            )
        for kill in self.faults.kill:
            rank = kill.get("rank", 0)
            if isinstance(rank, int) and rank >= self.cluster.workers:
                raise ValueError(
                    f"faults.kill={kill!r}: with cluster.workers={self.cluster.workers} no such rank"
                )
        if self.data.streaming and self.train.steps is None:
            raise ValueError(
                f"data.streaming=true does not know how long train.epochs={self.train.epochs:g} is: give "
                "train.steps, or set data.streaming=false"
            )
        if self.data.cache is None and "://" in self.run.folder and self.keeps_data:
            raise ValueError(
                f"run.storage={self.run.storage!r} is not a local folder: set data.cache to a folder that "
                "all ranks see (tokenised data is memory-mapped)"
            )
        return self

    @property
    def keeps_data(self) -> bool:
        """Whether anything lies in `data_folder`."""
        return not self.data.streaming or self.model.tokenizer_name == "bundled"

    @property
    def data_folder(self) -> Path:
        """Where tokenised data and the bundled tokenizer lie."""
        return Path(self.data.cache) if self.data.cache else Path(self.run.folder) / "data"

    def resolved(self) -> dict[str, Any]:
        """Every setting as JSON values, defaults filled in."""
        return self.model_dump(mode="json", by_alias=True)


def load_config(name: str, overrides: list[str] | tuple[str, ...] = ()) -> Config:
    """Reads a configuration.

    Args:
        name: a YAML file, or the name of one in `app/configs/` (`tiny`).
        overrides: `key.path=value`, values read as YAML; the last one wins.

    Raises:
        ConfigError: the file, a key or a value is wrong; names it.
    """
    settings = _read_yaml(name)
    for item in overrides:
        set_key(settings, item)
    return parse(settings, name)


def parse(settings: dict[str, Any], what: str = "configuration") -> Config:
    """The checked configuration of a nested dict."""
    return parse_section(Config, settings, what)


def parse_section(kind: type[S], settings: dict[str, Any], what: str) -> S:
    """One checked section of a nested dict.

    Raises:
        ConfigError: names each wrong key and its value.
    """
    try:
        return kind.model_validate(settings)
    except ValidationError as error:
        raise ConfigError(describe(error, what)) from None


def set_key(settings: dict[str, Any], item: str) -> None:
    """Applies one `key.path=value` to nested dicts."""
    path, equals, text = item.partition("=")
    if not equals or not path:
        raise ConfigError(f"--set {item!r} must look like train.steps=50")
    *parents, last = path.split(".")
    place: Any = settings
    for key in parents:
        place = place.setdefault(key, {})
        if not isinstance(place, dict):
            raise ConfigError(f"--set {item!r}: {key!r} is {place!r}, not a section")
    try:
        place[last] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {item!r}: the value is not YAML ({error})") from None


def _read_yaml(name: str) -> dict[str, Any]:
    path = Path(name) if name.endswith((".yaml", ".yml")) else CONFIGS / f"{name}.yaml"
    if not path.is_file():
        known = sorted(file.stem for file in CONFIGS.glob("*.yaml"))
        raise ConfigError(f"no configuration {name!r} ({path}); known names: {known}", path=str(path))
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}", path=str(path)) from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{path} must hold sections such as run, model and train", path=str(path))
    return settings

"""The only file that knows DeepSpeed: layer groups, this rank's slices of a layer, reading and writing them.

Under ZeRO-3 each parameter is flattened, padded to a multiple of the world size and cut into equal parts; a
rank's parts of one optimizer sub-group lie one after the other in one flat fp32 tensor. A part may end in
padding that nobody initialises, so everything here speaks of the real elements alone.
"""

import math
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from layercheck.errors import EngineRefusedError
from layercheck.group_norms import batch_group_norms
from layercheck.groups import OptimizerGroup
from layercheck.layers import VERSION_BYTES, LayerMap, LayerSpec, ParamSpec, build_layer_map
from layercheck.model_facts import json_settings
from layercheck.partition import ParamSlice, SubGroup, merge
from layercheck.persistence.scalars import pack_scalar, unpack_scalar
from layercheck.persistence.shard_file import MASTER
from layercheck.supported import refuse_unsupported
from layercheck.updates import OptimizerCalls

FROZEN = "weight"
_SCHEDULED = ("lr", "momentum", "betas")


def describe_model(model: nn.Module) -> LayerMap:
    """The layer map of a model, partitioned or not. A tied parameter belongs to its first owner."""
    lists = [
        (len(module), name) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)
    ]
    block_list = max(lists, key=lambda item: item[0])[1] if lists else None
    embeddings = frozenset(
        f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Embedding)
    )
    params = [(_spec(name, param), param.requires_grad) for name, param in model.named_parameters()]
    return build_layer_map(params, block_list, embeddings)


def layer_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Optimizer groups that mirror the layers (paper 3.4.1), to be given to the optimizer.

    Matrices decay, vectors (biases, norms) do not. A layer with both kinds gives two groups, with one kind
    one; frozen parameters are left out.

    Args:
        model: the model, before `deepspeed.initialize`.
        weight_decay: decay of the matrices, as in `torch.optim.AdamW`.

    Returns:
        Groups with the keys `params`, `weight_decay` and `layer` (the layer's name).
    """
    named = dict(model.named_parameters())
    groups: list[dict[str, Any]] = []
    for layer in describe_model(model).trainable:
        for decays in (True, False):
            params = [named[spec.name] for spec in layer.params if (len(spec.shape) > 1) == decays]
            if params:
                decay = weight_decay if decays else 0.0
                groups.append({"params": params, "weight_decay": decay, "layer": layer.name})
    return groups


def _spec(name: str, param: nn.Parameter) -> ParamSpec:
    shape = getattr(param, "ds_shape", param.shape)
    return ParamSpec(name=name, shape=tuple(shape), dtype=str(param.dtype).removeprefix("torch."))


class Zero3Engine:
    """What LayerCheck needs of a DeepSpeed ZeRO-3 engine, by layer.

    Raises:
        EngineRefusedError: the engine is of a kind whose updates the hooks would miss, or a group mixes
        layers.
    """

    def __init__(self, engine: Any) -> None:
        refuse_unsupported(engine)
        self.engine = engine
        self.zero = engine.optimizer
        self.optimizer: torch.optim.Optimizer = engine.optimizer.optimizer
        self.layer_map = describe_model(engine.module)
        self.rank = torch.distributed.get_rank()
        self.world_size = torch.distributed.get_world_size()
        self._params = dict(engine.module.named_parameters())
        self._names = {id(param): name for name, param in self._params.items()}
        on_host = torch.distributed.get_backend() == "gloo"
        self.collective_device = torch.device("cpu") if on_host else engine.device
        self.slices = {layer.name: tuple(self._slices(layer)) for layer in self.layer_map.layers}
        self.sub_groups = tuple(self._sub_groups())
        self._calls = OptimizerCalls(
            self.optimizer,
            self.zero.fp32_partitioned_groups_flat,
            [sub_group.group for sub_group in self.sub_groups],
            partial(batch_group_norms, self.zero),
        )

    # ------------------------------------------------------------------ shape

    def _slices(self, layer: LayerSpec) -> Iterator[ParamSlice]:
        for spec in layer.params:
            param = self._params[spec.name]
            part = param.ds_tensor.ds_numel
            offset = min(part * self.rank, spec.numel)
            numel = max(0, min(part, spec.numel - offset))
            sub_group, begin = -1, 0
            if layer.trainable:
                sub_group, begin, _ = self.zero.grad_position[self.zero.get_param_id(param)]
            yield ParamSlice(spec, layer.name, offset, numel, sub_group, begin)

    def _sub_groups(self) -> Iterator[SubGroup]:
        by_index: dict[int, list[ParamSlice]] = {}
        for slices in self.slices.values():
            for part in slices:
                by_index.setdefault(part.sub_group, []).append(part)
        for index, flat in enumerate(self.zero.fp32_partitioned_groups_flat):
            members = sorted(by_index[index], key=lambda part: part.begin)
            layers = sorted({part.layer for part in members})
            if len(layers) > 1:
                raise EngineRefusedError(
                    f"optimizer group {index} mixes the layers {layers[0]} and {layers[1]}: give it "
                    "layercheck.layer_groups(model, weight_decay)",
                    layers=layers,
                )
            group = self.zero.sub_group_to_group_id[index]
            yield SubGroup(index, group, layers[0], flat.detach(), merge(members))

    @property
    def on_accelerator(self) -> bool:
        """True when the fp32 partitions live on a device whose copies should go to pinned memory."""
        return self.sub_groups[0].flat.device.type != "cpu"

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's full state: fp32 weights and two moments."""
        return sum(VERSION_BYTES * length for group in self.sub_groups for _, length in group.segments)

    def layer_nbytes(self, layer: str) -> int:
        """Bytes of one version of a layer over all ranks, with the optimizer state that exists now."""
        return sum(
            part.spec.numel * tensor.element_size()
            for part in self.slices[layer]
            for tensor in self.tensors(part).values()
        )

    @property
    def initial_lr(self) -> float:
        """Largest learning rate that the optimizer groups started with."""
        return max(float(group.get("initial_lr", group["lr"])) for group in self.optimizer.param_groups)

    def optimizer_groups(self) -> tuple[OptimizerGroup, ...]:
        """The groups with the settings that they have now; what is no JSON value is left out."""
        names: list[list[str]] = [[] for _ in self.optimizer.param_groups]
        for index, params in enumerate(self.zero.fp16_groups):
            names[self.zero.sub_group_to_group_id[index]] += [self._names[id(param)] for param in params]
        return tuple(
            OptimizerGroup(names=tuple(members), settings=json_settings(group))
            for members, group in zip(names, self.optimizer.param_groups, strict=True)
        )

    # ------------------------------------------------------------------ counters

    @property
    def step(self) -> int:
        """Optimizer steps taken, skipped ones included."""
        return int(self.engine.global_steps)

    @property
    def skipped(self) -> int:
        """Steps whose update was skipped because of an overflow."""
        return int(self.engine.skipped_steps)

    def grad_norm(self) -> Tensor | float | None:
        """Global gradient norm of the last step that was not skipped, before clipping; may be on a device."""
        norm: Tensor | float | None = self.engine.get_global_grad_norm()
        return norm

    def global_state(self) -> dict[str, Any]:
        """Everything beside the layers that the next step depends on, as JSON values."""
        state: dict[str, Any] = {"skipped": self.skipped, "loss_scale": float(self.zero.loss_scale)}
        if self.engine.lr_scheduler is not None:
            state["lr_scheduler"] = self.engine.lr_scheduler.state_dict()
            # A scheduler sets its values when it steps: those of the next update are in the groups alone.
            groups = self.optimizer.param_groups
            state["groups"] = [{key: group[key] for key in _SCHEDULED if key in group} for group in groups]
        return state

    def set_global_state(self, step: int, state: dict[str, Any]) -> None:
        """Puts the counters, the loss scale and the LR scheduler where `global_state` found them."""
        engine = self.engine
        engine.global_steps = step
        engine.micro_steps = step * engine.gradient_accumulation_steps()
        engine.global_samples = step * engine.train_batch_size()
        engine.skipped_steps = state.get("skipped", 0)
        if engine.fp16_enabled() and "loss_scale" in state:
            self.zero.loss_scaler.cur_scale = state["loss_scale"]
        if engine.lr_scheduler is not None and "lr_scheduler" in state:
            engine.lr_scheduler.load_state_dict(state["lr_scheduler"])
            for group, values in zip(self.optimizer.param_groups, state.get("groups", ()), strict=False):
                group.update(values)

    # ------------------------------------------------------------------ hooks

    def on_update(
        self, before: Callable[[SubGroup, float], None], after: Callable[[SubGroup], None]
    ) -> Callable[[], None]:
        """Calls `before(sub_group, lr)` and `after(sub_group)` around each realised update.

        Returns:
            A function that ends it. Any number of listeners may come and go.
        """
        return self._calls.listen(
            lambda index, lr: before(self.sub_groups[index], lr),
            lambda index: after(self.sub_groups[index]),
        )

    # ------------------------------------------------------------------ reading

    def tensors(self, part: ParamSlice) -> dict[str, Tensor]:
        """The live tensors of one slice, each of shape (numel,): `fp32` and the optimizer's own."""
        if part.sub_group < 0:
            weight = self._params[part.spec.name].ds_tensor.detach()
            return {FROZEN: weight.narrow(0, 0, part.numel)}
        flat = self.zero.fp32_partitioned_groups_flat[part.sub_group]
        found = {MASTER: flat.detach().narrow(0, part.begin, part.numel)}
        for key, value in self._state(part.sub_group).items():
            if isinstance(value, Tensor) and value.numel() == flat.numel() and value.dim() > 0:
                found[key] = value.detach().narrow(0, part.begin, part.numel)
        return found

    def scalars(self, part: ParamSlice) -> dict[str, dict[str, Any]]:
        """The optimizer's scalars of the slice's sub-group, such as the Adam step: {key: {kind, value}}."""
        if part.sub_group < 0:
            return {}
        flat = self.zero.fp32_partitioned_groups_flat[part.sub_group]
        return {
            key: pack_scalar(key, value)
            for key, value in self._state(part.sub_group).items()
            if not (isinstance(value, Tensor) and value.numel() == flat.numel() and value.dim() > 0)
        }

    def _state(self, sub_group: int) -> dict[str, Any]:
        flat = self.zero.fp32_partitioned_groups_flat[sub_group]
        state = self.optimizer.state
        return dict(state[flat]) if flat in state else {}

    # ------------------------------------------------------------------ writing

    def begin_install(self) -> None:
        """Brings every parameter back to its partition, so that no gathered copy outlives the install."""
        self.zero._partition_all_parameters()

    def room(self, part: ParamSlice, key: str) -> Tensor:
        """The live memory of one tensor of a slice, shape (numel,), to be written by the caller.

        Optimizer state that a fresh engine lacks is created, of zeros; nothing is stepped.
        """
        if part.sub_group < 0:
            assert key == FROZEN, f"a frozen parameter has no {key}"
            weight: Tensor = self._params[part.spec.name].ds_tensor.detach()
            return weight.narrow(0, 0, part.numel)
        whole: Tensor = self.zero.fp32_partitioned_groups_flat[part.sub_group]
        if key != MASTER:
            state = self.optimizer.state[whole]
            if key not in state:
                state[key] = _zeros_like(whole)
            whole = state[key]
        return whole.detach().narrow(0, part.begin, part.numel)

    def set_scalars(self, part: ParamSlice, scalars: dict[str, dict[str, Any]]) -> None:
        """Puts the optimizer's scalars of the slice's sub-group back, as `scalars` gave them."""
        for key, packed in scalars.items():
            flat = self.zero.fp32_partitioned_groups_flat[part.sub_group]
            self.optimizer.state[flat][key] = self._placed(part.sub_group, unpack_scalar(packed))

    def _placed(self, sub_group: int, value: Any) -> Any:
        """Torch keeps the step of a fused or capturable optimizer beside the weights, else on the host."""
        group = self.optimizer.param_groups[self.sub_groups[sub_group].group]
        if isinstance(value, Tensor) and (group.get("fused") or group.get("capturable")):
            return value.to(self.sub_groups[sub_group].flat.device)
        return value

    def clear_state(self, sub_group: int) -> None:
        """Forgets the optimizer state of one sub-group, before older state (or none) is put in."""
        self.optimizer.state.pop(self.zero.fp32_partitioned_groups_flat[sub_group], None)

    def abandon_install(self, layers: Collection[str]) -> None:
        """Leaves nothing of an install of these layers that failed before its end.

        The fp32 weights follow the low-precision ones, which were not touched. Where there is no such second
        copy (fp32 training, frozen layers) the values are lost and become NaN, for nobody to train on.
        """
        for sub_group in self.sub_groups:
            self.clear_state(sub_group.index)
            low = self.zero.fp16_partitioned_groups_flat[sub_group.index].detach()
            has_copy = low.data_ptr() != sub_group.flat.data_ptr()
            sub_group.flat.copy_(low) if has_copy else sub_group.flat.fill_(math.nan)
        for part in (part for name in layers for part in self.slices[name] if part.sub_group < 0):
            weight = self.tensors(part)[FROZEN]
            weight.fill_(math.nan if weight.is_floating_point() else 0)

    def end_install(self) -> None:
        """Copies fp32 into the low-precision partitions and gathers the parameters that stay gathered.

        One collective when such parameters exist; every rank must call this.
        """
        for index in range(len(self.sub_groups)):
            self.zero._reassign_or_swap_out_partitioned_parameters(index)
        persistent = self.zero.persistent_parameters
        if persistent:
            persistent[0].all_gather(persistent)

    def stale_parameter(self) -> str | None:
        """Name of a parameter whose low-precision values are not its fp32 values, or None.

        Compares this rank's real elements, in the partition and in the gathered copy if there is one.
        """
        for slices in self.slices.values():
            for part in slices:
                if part.sub_group >= 0 and not self._agrees(part):
                    return part.spec.name
        return None

    def _agrees(self, part: ParamSlice) -> bool:
        param = self._params[part.spec.name]
        master = self.tensors(part)[MASTER]
        low = param.ds_tensor.detach().narrow(0, 0, part.numel).to(master.device)
        if not torch.equal(low, master.to(low.dtype)):
            return False
        if param.numel() != part.spec.numel:
            return True
        gathered = param.detach().reshape(-1).narrow(0, part.offset, part.numel).to(master.device)
        return torch.equal(gathered, master.to(gathered.dtype))


def _zeros_like(flat: Tensor) -> Tensor:
    """Zeros of the same shape, type and device; on a host their memory is first touched by who fills it."""
    if flat.device.type != "cpu" or flat.dtype != torch.float32:
        return torch.zeros_like(flat, requires_grad=False)
    return torch.from_numpy(np.zeros(flat.shape, dtype=np.float32))

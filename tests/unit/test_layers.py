"""The layer map: every parameter in exactly one layer, names that last."""

from layercheck.layers import LayerMap, ParamSpec, build_layer_map


def param(name: str, *shape: int) -> ParamSpec:
    return ParamSpec(name=name, shape=shape or (4, 2), dtype="torch.bfloat16")


def build(*named: str | tuple[str, bool], blocks: str | None = "model.layers") -> LayerMap:
    pairs = [(item, True) if isinstance(item, str) else item for item in named]
    embeddings = frozenset(name for name, _ in pairs if name.endswith("embed_tokens.weight"))
    return build_layer_map([(param(name), trainable) for name, trainable in pairs], blocks, embeddings)


QWEN = (
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.input_layernorm.weight",
    "model.layers.1.self_attn.q_proj.weight",
    "model.layers.10.mlp.up_proj.weight",
    "model.norm.weight",
    "lm_head.weight",
)


def test_a_decoder_has_its_blocks_and_three_more_layers_in_model_order():
    layers = build(*QWEN).layers
    names = ["embed_tokens", "layers.0", "layers.1", "layers.10", "norm", "lm_head"]
    assert [layer.name for layer in layers] == names
    assert [layer.kind for layer in layers] == ["embedding", "block", "block", "block", "other", "other"]


def test_each_parameter_belongs_to_exactly_one_layer():
    layer_map = build(*QWEN)
    assert set(layer_map.layer_of) == set(QWEN)
    assert sum(len(layer.params) for layer in layer_map.layers) == len(QWEN)
    assert layer_map.layer_of["model.layers.1.self_attn.q_proj.weight"] == "layers.1"


def test_a_tied_head_appears_once_under_its_owner():
    assert [layer.name for layer in build(*QWEN[:-1]).layers][-1] == "norm"


def test_i11_the_frozen_part_of_a_layer_is_its_own_layer():
    layer_map = build(
        ("model.layers.0.q_proj.base.weight", False), ("model.layers.0.q_proj.lora_A.weight", True)
    )
    assert [(layer.name, layer.trainable) for layer in layer_map.layers] == [
        ("layers.0.frozen", False),
        ("layers.0", True),
    ]
    assert [layer.name for layer in layer_map.trainable] == ["layers.0"]


def test_two_modules_with_one_last_name_do_not_share_a_layer():
    layer_map = build("encoder.norm.weight", "encoder.norm.bias", "decoder.norm.weight")
    assert [layer.name for layer in layer_map.layers] == ["norm", "decoder.norm"]
    assert [len(layer.params) for layer in layer_map.layers] == [2, 1]


def test_a_model_without_blocks_and_a_parameter_without_a_module_have_layers_too():
    assert [layer.name for layer in build("weight", "head.weight", blocks=None).layers] == ["weight", "head"]


def test_the_size_of_a_layer_is_that_of_all_ranks():
    layer_map = build_layer_map([(param("a.x", 3, 5), True), (param("a.y", 7), True)], None, frozenset())
    assert layer_map.by_name["a"].numel == 22
    assert ParamSpec(name="scalar", shape=(), dtype="float32").numel == 1


def test_i7_the_first_difference_between_two_models_is_named():
    ours = build(*QWEN)
    assert ours.difference(build(*QWEN)) is None
    assert ours.difference(build(*QWEN[:-1])) == "parameter lm_head.weight is missing"
    assert build(*QWEN[:-1]).difference(ours) == "parameter lm_head.weight is new"
    frozen = build(*QWEN[:-1], ("lm_head.weight", False)).difference(ours)
    assert frozen.startswith("parameter lm_head.weight is [4, 2] in layer lm_head, not")
    assert "frozen" in frozen


def test_a_layer_map_survives_its_json():
    layer_map = build(*QWEN, ("extra.weight", False))
    assert LayerMap.model_validate_json(layer_map.model_dump_json()) == layer_map


def test_the_prefix_of_an_adapter_library_changes_no_layer():
    prefixed = build(*(f"base_model.model.{name}" for name in QWEN), blocks="base_model.model.model.layers")
    assert [layer.name for layer in prefixed.layers] == [layer.name for layer in build(*QWEN).layers]

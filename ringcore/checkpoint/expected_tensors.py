"""The tensors that a model needs from its checkpoint, from its configuration alone: checked before a worker starts.

The models declare the same with their layers; a test compares the two.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from ringcore.checkpoint.family import Families, Family
from ringcore.checkpoint.gguf_header import read_gguf_header
from ringcore.checkpoint.gguf_tensors import GGUFTensors
from ringcore.checkpoint.matrix_tensors import BIAS, DENSE, MatrixTensor
from ringcore.checkpoint.model_files import ModelFiles
from ringcore.checkpoint.model_spec import ModelSpec
from ringcore.checkpoint.quantization import GGUF_BLOCKS, GgufFormat, OnLoadFormat
from ringcore.checkpoint.quantization.contents import check_contents
from ringcore.checkpoint.safetensors_header import DTYPE_BYTES, TensorIndex
from ringcore.errors import ModelLoadError

__all__ = [
    "EXPERT_MATRICES",
    "ROUTER",
    "and_more",
    "check_checkpoint",
    "check_tensors",
    "expected_tensors",
    "expert_matrix",
    "is_dispensable",
    "layer_tensors",
    "matrices",
    "num_parameters",
    "quantized_bytes",
    "stored_bytes",
]

Shape = tuple[int, ...]

# Of a mixture of experts, within `model.layers.<i>.`; the matrices are those of each expert, as of an MLP.
ROUTER = "mlp.gate"
EXPERT_MATRICES = ("gate_proj", "up_proj", "down_proj")

# Tensors of a checkpoint that are ignored: computed tables, the copy of the embeddings in some tied checkpoints, and
# scales of a quantized KV cache, which are computed here for each token, and layers of multi-token prediction, which
# draft and are read by themselves (`mtp_head`). Any other tensor that the model does not use
# means that the model would compute something else than the checkpoint's.
_DISPENSABLE = re.compile(
    r"(.*\.)?(rotary_emb\.(inv_freq|cos_cached|sin_cached)|self_attn\.[kv]_scale)|lm_head\.weight|model\.mtp_layers\..*"
)


def is_dispensable(checkpoint_name: str) -> bool:
    """Whether a model may ignore this tensor."""
    return _DISPENSABLE.fullmatch(checkpoint_name) is not None


def and_more(names: Sequence[str]) -> str:
    """The suffix of an error that shows the first of several names."""
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def expected_tensors(spec: ModelSpec, family: Family) -> dict[str, Shape]:
    """The shape of every tensor, by its Hugging Face name. family: of `spec.architecture`."""
    table = (spec.vocab_size, spec.hidden_size)
    tensors: dict[str, Shape] = {"model.embed_tokens.weight": table, "model.norm.weight": (spec.hidden_size,)}
    norms = dict(_norms_of_layer(spec, family))
    for layer in range(spec.num_layers):
        tensors.update((f"model.layers.{layer}.{name}", shape) for name, shape in norms.items())
    return tensors | _shapes_of(spec, matrices(spec))


def layer_tensors(spec: ModelSpec, family: Family, layer: int, name: str) -> dict[str, Shape]:
    """Those of a layer as `layer` is, which has another name."""
    norms = {f"{name}.{norm}": shape for norm, shape in _norms_of_layer(spec, family)}
    return norms | _shapes_of(spec, _of_layer(spec, layer, name))


def _shapes_of(spec: ModelSpec, found: Iterable[tuple[str, tuple[int, int], bool]]) -> dict[str, Shape]:
    return {
        f"{matrix}.{tensor.suffix}": tensor.shape(*size)
        for matrix, size, has_bias in found
        for tensor in (*_tensors_of(spec, matrix), *([BIAS] if has_bias else []))
    }


def expert_matrix(mixture: str, expert: int, matrix: str) -> str:
    """The name of one of `EXPERT_MATRICES`, by that of the mixture."""
    return f"{mixture}.experts.{expert}.{matrix}"


def matrices(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, int], bool]]:
    """(name, (outputs, inputs), whether it has a bias) of every matrix but the embedding and a head tied to it."""
    if not spec.tie_word_embeddings:
        yield "lm_head", (spec.vocab_size, spec.hidden_size), False
    for layer in range(spec.num_layers):
        yield from _of_layer(spec, layer, f"model.layers.{layer}")


def _of_layer(spec: ModelSpec, layer: int, layer_name: str) -> Iterator[tuple[str, tuple[int, int], bool]]:
    hidden = spec.hidden_size
    heads, kv_heads = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    for name, size, has_bias in (
        ("self_attn.q_proj", (heads, hidden), spec.attention_bias),
        ("self_attn.k_proj", (kv_heads, hidden), spec.attention_bias),
        ("self_attn.v_proj", (kv_heads, hidden), spec.attention_bias),
        ("self_attn.o_proj", (hidden, heads), spec.attention_out_bias),
        *_of_mlp(spec, layer),
    ):
        yield f"{layer_name}.{name}", size, has_bias


def _of_mlp(spec: ModelSpec, layer: int) -> Iterator[tuple[str, tuple[int, int], bool]]:
    """Or of the experts in its place."""
    hidden, experts = spec.hidden_size, spec.experts_of(layer)
    inner = spec.intermediate_size if experts is None else experts.intermediate_size
    sizes = ((inner, hidden), (inner, hidden), (hidden, inner))
    if experts is None:
        for matrix, size in zip(EXPERT_MATRICES, sizes, strict=True):
            yield f"mlp.{matrix}", size, spec.mlp_bias
        return
    yield ROUTER, (experts.num_experts, hidden), False
    for expert in range(experts.num_experts):
        for matrix, size in zip(EXPERT_MATRICES, sizes, strict=True):
            yield expert_matrix("mlp", expert, matrix), size, False


def quantized_bytes(spec: ModelSpec) -> dict[str, int]:
    """The bytes in memory of the tensors of quantized matrices, and of a table that is packed, by their names."""
    found = {}
    table = None if spec.quantization is None else spec.quantization.format_of("model.embed_tokens")
    if isinstance(table, GgufFormat):
        found["model.embed_tokens.weight"] = spec.vocab_size * table.row_bytes(spec.hidden_size)
    for matrix, (num_outputs, num_inputs), _ in matrices(spec):
        form = None if spec.quantization is None else spec.quantization.format_of(matrix)
        if isinstance(form, OnLoadFormat | GgufFormat):
            found[f"{matrix}.weight"] = num_outputs * form.row_bytes(num_inputs)
            continue
        for tensor in () if form is None else form.tensors:
            assert tensor.dtype is not None, tensor
            size = math.prod(tensor.shape(num_outputs, num_inputs))
            found[f"{matrix}.{tensor.suffix}"] = size * DTYPE_BYTES[tensor.dtype]
    return found


def _tensors_of(spec: ModelSpec, matrix: str) -> tuple[MatrixTensor, ...]:
    form = None if spec.quantization is None else spec.quantization.format_of(matrix)
    return DENSE if form is None else form.tensors


def _norms_of_layer(spec: ModelSpec, family: Family) -> Iterator[tuple[str, Shape]]:
    for norm in family.norms.of_hidden():
        yield f"{norm}.weight", (spec.hidden_size,)
    if family.head_norm:
        for norm in (family.norms.query, family.norms.key):
            yield f"{norm}.weight", (spec.head_dim,)


def check_checkpoint(files: ModelFiles, spec: ModelSpec, families: Families) -> None:
    """Raises `ModelLoadError` as `check_tensors` does, by the headers of the files; dummy weights have none."""
    expected = expected_tensors(spec, families[spec.architecture])
    match files.kind:
        case "safetensors":
            index = TensorIndex(files.weight_files)
            shapes = {name: entry.shape for name, entry in index.items()}
            check_tensors(expected, shapes, files.path, lambda name: index[name].file)
            if spec.quantization is not None:
                check_contents(index, spec.quantization)
        case "gguf":
            tensors = GGUFTensors(files.weight_files[0], families)
            check_tensors(expected, tensors.shapes, files.path, lambda _: tensors.path)
        case "dummy":
            pass


def num_parameters(files: ModelFiles) -> int:
    """By the headers of the files; of dummy weights, which have none, 0."""
    match files.kind:
        case "safetensors":
            return sum(math.prod(entry.shape) for entry in TensorIndex(files.weight_files).values())
        case "gguf":
            return sum(math.prod(info.shape) for info in read_gguf_header(files.weight_files[0]).tensors.values())
        case "dummy":
            return 0


def stored_bytes(files: ModelFiles, number_bytes: int) -> int:
    """Of safetensors, the tensors as they are; of a GGUF file, matrices in blocks, and numbers of all else."""
    if files.kind == "safetensors":
        return sum(entry.nbytes for entry in TensorIndex(files.weight_files).values())
    from gguf.constants import GGMLQuantizationType

    return sum(
        info.nbytes
        if GGMLQuantizationType(info.ggml_type).name in GGUF_BLOCKS
        else math.prod(info.shape) * number_bytes
        for info in read_gguf_header(files.weight_files[0]).tensors.values()
    )


def check_tensors(
    expected: Mapping[str, Shape],
    found: Mapping[str, Shape],
    path: str,
    file_of: Callable[[str], str],
    may_ignore: Callable[[str], bool] = is_dispensable,
) -> None:
    """Checks that every tensor exists in the right shape, and none is unused but those that the model may ignore.
    file_of: a tensor's file, for errors.

    Raises `ModelLoadError` that names the tensor, the file and both shapes.
    """
    missing = [name for name in expected if name not in found]
    if missing:
        raise ModelLoadError(
            f"{path}: tensor {missing[0]!r} is missing{and_more(missing)}; the files are incomplete "
            "or config.json describes another model",
            path=path,
            tensor=missing[0],
        )
    for name, shape in expected.items():
        if found[name] != shape:
            file = file_of(name)
            raise ModelLoadError(
                f"{file}: tensor {name!r} has the shape {list(found[name])}, the configuration asks for "
                f"{list(shape)}; weights and configuration are of different models",
                path=file,
                tensor=name,
            )
    unused = [name for name in found if name not in expected and not may_ignore(name)]
    if unused:
        file = file_of(unused[0])
        raise ModelLoadError(
            f"{file}: tensor {unused[0]!r} has no place in the model{and_more(unused)}; its output would be wrong "
            "without it: config.json describes another model, or the checkpoint is quantized or carries adapters",
            path=file,
            tensor=unused[0],
        )

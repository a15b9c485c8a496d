"""Reads a model's configuration, tokenizer and tensor headers without loading weights; it does not import torch."""

from ringcore.checkpoint.family import Families, Family
from ringcore.checkpoint.gguf_header import GGUFHeader, GGUFTensorInfo, read_gguf_header
from ringcore.checkpoint.model_files import ModelFiles, find_model
from ringcore.checkpoint.model_spec import AnySpec, CommonSpec, ModelSpec, RopeSpec, TransformersSpec
from ringcore.checkpoint.safetensors_header import TensorEntry, TensorIndex, read_safetensors_header
from ringcore.checkpoint.spec_reader import read_model_spec

__all__ = [
    "AnySpec",
    "CommonSpec",
    "Families",
    "Family",
    "GGUFHeader",
    "GGUFTensorInfo",
    "ModelFiles",
    "ModelSpec",
    "RopeSpec",
    "TensorEntry",
    "TensorIndex",
    "TransformersSpec",
    "find_model",
    "read_gguf_header",
    "read_model_spec",
    "read_safetensors_header",
]

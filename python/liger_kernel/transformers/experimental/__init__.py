"""Modules whose names the API calls experimental; here they are not."""

from liger_kernel.transformers.experimental.embedding import LigerEmbedding

__all__ = ["LigerEmbedding"]

"""Operators whose names the API calls experimental; here they are not."""

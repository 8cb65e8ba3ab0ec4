"""Matched small models: trained here, on text that is on every machine, and shipped with the package."""

"""Integrations: the layer inside other people's models."""

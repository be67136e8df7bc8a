"""A functional JAX stack that trains agentic vision policies."""

__version__ = "0.1.0"

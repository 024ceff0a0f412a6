"""Rewrites of jaxprs, equation by equation: a jaxpr under construction, and a walk over one."""

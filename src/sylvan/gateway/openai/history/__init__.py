"""Responses and conversations stored by the gateway, so that any upstream can continue them."""

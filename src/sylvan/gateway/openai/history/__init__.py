"""Responses and conversations that the gateway keeps, so that any upstream can go on with them."""

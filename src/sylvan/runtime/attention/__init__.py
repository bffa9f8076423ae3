"""Attention backends, one file each; `reference` defines the correct results.

A backend has `plan`, called once per step, and `run`, called once per layer (`api`). Its `caps` say
what it supports; `executor.attention_choice` selects a backend by them.
"""

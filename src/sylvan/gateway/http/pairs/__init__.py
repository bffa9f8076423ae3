"""Prefill-decode disaggregation: requests served by a prefill and a decode worker."""

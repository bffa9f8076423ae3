"""Converts vocabularies in other formats to tokenizer.json, without their libraries."""

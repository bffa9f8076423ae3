"""Guarded generation: schemas that no grammar can enforce.

Parts of a schema without an equivalent grammar are left out of it (`relax`), and checked as
values close (`watch`, using `conditions`). A value that violates the schema is rolled back to
where another token is possible, and the token that led to it is banned (`guard`).
"""

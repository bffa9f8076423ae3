"""Guarded generation: schemas that no grammar can hold.

What of a schema has no equivalent is left out of the grammar (`relax`). What was left out is
checked as values close (`watch`, by `conditions`); a value that breaks the schema is taken back to
where another way is open, and that way is barred (`guard`).
"""

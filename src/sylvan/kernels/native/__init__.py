"""Step programs: traced ops, compiled for the library of C++ kernels and run by it.

The path of a program: `tracer` emits typed ops (`opset`, defined by `schema`) into a `graph`;
`compile` runs the passes over it (`weights` packs, `quantise` fuses, `layout` plans memory,
`barriers` synchronises); `program` runs the result. `library` loads the C++ library, `binding`
mirrors its C ABI (`program.h`), and `codegen` generates its structs from `opset`.
"""

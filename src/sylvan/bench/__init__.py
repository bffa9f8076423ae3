"""Load tests: data sets, clients of every API, measurements and reports (`sylvan bench`).

Start at `run.measure`: it makes a target (`target`, `apis`) and a workload (`datasets`), `load`
sends the requests, `metrics` computes the figures, `results` stores them and `compare` compares
two files. `batch` times single batches without a server.
"""

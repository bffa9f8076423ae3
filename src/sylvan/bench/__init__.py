"""Load tests: data sets, clients of every API, measurements and reports (`sylvan bench`)."""

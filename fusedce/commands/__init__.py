"""The faces of `fusedce explain`, `doctor`, `verify`, `tune` and `bench`: options, tables, JSON, exit codes."""

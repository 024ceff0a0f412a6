"""The base of every other package: settings, errors, dtypes, pytrees, devices, source lines."""

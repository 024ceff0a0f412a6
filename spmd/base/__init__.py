"""What every other package needs: settings, errors, dtypes, pytrees, devices, source lines."""

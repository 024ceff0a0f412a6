"""The constants by which the choice of axes counts: the same on all machines and ranks."""

# Seconds to move a byte from device to device, to begin an exchange, for one multiply-add of a
# product and for one element of anything else.
BYTE = 1e-10
EXCHANGE = 2e-6
MULTIPLY_ADD = 2e-11
ELEMENT = 2e-10

"""Small faulty programs and their correct look-alikes, run under spmdrun: is the fault named?

python -m tests.faults                    # all of them, and the table
python -m tests.faults mismatched alike   # parts, or single programs by name
spmdrun -n 3 tests/faults/play.py mismatched.operator   # one, to see what a user sees
"""

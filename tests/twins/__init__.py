"""Steps beside slow twins that say what they should come to: for tests of transformations and of training.

What tests share travels to the workers by value: test directories aren't installed there.
"""

import cloudpickle

from tests.twins import cases, feedback, phases, training

for module in (cases, feedback, phases, training):
    cloudpickle.register_pickle_by_value(module)

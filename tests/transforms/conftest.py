"""What tests share travels to the workers by value: test directories aren't installed there."""

import cloudpickle

from . import cases, training

cloudpickle.register_pickle_by_value(cases)
cloudpickle.register_pickle_by_value(training)

"""Collectives: one operation and its transpose a file, all following the rules of :mod:`ltx.collectives.linear`."""

from ltx.collectives.adasum import adasum as adasum
from ltx.collectives.argextremum import pargmax as pargmax
from ltx.collectives.argextremum import pargmin as pargmin
from ltx.collectives.broadcast import broadcast as broadcast
from ltx.collectives.extremum import pmax as pmax
from ltx.collectives.extremum import pmin as pmin
from ltx.collectives.gather import AllGatherGrad as AllGatherGrad
from ltx.collectives.gather import all_gather as all_gather
from ltx.collectives.gather import psum_scatter as psum_scatter
from ltx.collectives.index import axis_index as axis_index
from ltx.collectives.objects import all_gather_object as all_gather_object
from ltx.collectives.objects import barrier as barrier
from ltx.collectives.objects import broadcast_object as broadcast_object
from ltx.collectives.permute import all_to_all as all_to_all
from ltx.collectives.permute import ppermute as ppermute
from ltx.collectives.psum import axis_size as axis_size
from ltx.collectives.psum import pmean as pmean
from ltx.collectives.psum import psum as psum
from ltx.collectives.psum import pvary as pvary
from ltx.collectives.ranks import rank_seed as rank_seed
from ltx.collectives.ranks import shard as shard
from ltx.collectives.reduce import reduce as reduce
from ltx.collectives.reduce import reduce_boolean_decision as reduce_boolean_decision
from ltx.collectives.uneven import gather_all_tensors as gather_all_tensors
from ltx.collectives.weighted_mean import weighted_mean as weighted_mean

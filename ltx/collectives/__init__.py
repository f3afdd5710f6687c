"""Collectives: one operation and its transpose a file, all following the rules of :mod:`ltx.collectives.linear`."""

from ltx.collectives.broadcast import broadcast as broadcast
from ltx.collectives.gather import AllGatherGrad as AllGatherGrad
from ltx.collectives.gather import all_gather as all_gather
from ltx.collectives.gather import psum_scatter as psum_scatter
from ltx.collectives.index import axis_index as axis_index
from ltx.collectives.objects import barrier as barrier
from ltx.collectives.objects import broadcast_object as broadcast_object
from ltx.collectives.psum import axis_size as axis_size
from ltx.collectives.psum import pmean as pmean
from ltx.collectives.psum import psum as psum
from ltx.collectives.psum import pvary as pvary
from ltx.collectives.ranks import rank_seed as rank_seed
from ltx.collectives.ranks import shard as shard
from ltx.collectives.weighted_mean import weighted_mean as weighted_mean

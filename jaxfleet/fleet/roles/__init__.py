"""Role makers: what a process of a job is, and who the others are."""

from jaxfleet.fleet.roles.base import RoleMakerBase as RoleMakerBase
from jaxfleet.fleet.roles.cloud import PaddleCloudRoleMaker as PaddleCloudRoleMaker
from jaxfleet.fleet.roles.cluster import ClusterRoleMaker as ClusterRoleMaker
from jaxfleet.fleet.roles.cluster import K8SRoleMaker as K8SRoleMaker
from jaxfleet.fleet.roles.general import GeneralRoleMaker as GeneralRoleMaker
from jaxfleet.fleet.roles.mpi import MPIRoleMaker as MPIRoleMaker
from jaxfleet.fleet.roles.role import Role as Role
from jaxfleet.fleet.roles.symmetric import MPICollectiveRoleMaker as MPICollectiveRoleMaker
from jaxfleet.fleet.roles.symmetric import MPISymetricRoleMaker as MPISymetricRoleMaker
from jaxfleet.fleet.roles.user_defined import (
    UserDefinedCollectiveRoleMaker as UserDefinedCollectiveRoleMaker,
)
from jaxfleet.fleet.roles.user_defined import UserDefinedRoleMaker as UserDefinedRoleMaker

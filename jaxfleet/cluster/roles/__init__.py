"""Role makers: the role of this process in a job, and the endpoints of the others."""

from jaxfleet.cluster.roles.base import Role as Role
from jaxfleet.cluster.roles.base import RoleMakerBase as RoleMakerBase
from jaxfleet.cluster.roles.cloud import PaddleCloudRoleMaker as PaddleCloudRoleMaker
from jaxfleet.cluster.roles.general import GeneralRoleMaker as GeneralRoleMaker
from jaxfleet.cluster.roles.scheduler import ClusterRoleMaker as ClusterRoleMaker
from jaxfleet.cluster.roles.scheduler import K8SRoleMaker as K8SRoleMaker
from jaxfleet.cluster.roles.scheduler import MPICollectiveRoleMaker as MPICollectiveRoleMaker
from jaxfleet.cluster.roles.scheduler import MPIRoleMaker as MPIRoleMaker
from jaxfleet.cluster.roles.scheduler import MPISymetricRoleMaker as MPISymetricRoleMaker
from jaxfleet.cluster.roles.user_defined import (
    UserDefinedCollectiveRoleMaker as UserDefinedCollectiveRoleMaker,
)
from jaxfleet.cluster.roles.user_defined import UserDefinedRoleMaker as UserDefinedRoleMaker

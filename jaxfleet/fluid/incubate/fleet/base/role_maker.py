"""Role makers at Paddle's path."""

from jaxfleet.cluster.roles import GeneralRoleMaker as GeneralRoleMaker
from jaxfleet.cluster.roles import K8SRoleMaker as K8SRoleMaker
from jaxfleet.cluster.roles import MPIRoleMaker as MPIRoleMaker
from jaxfleet.cluster.roles import MPISymetricRoleMaker as MPISymetricRoleMaker
from jaxfleet.cluster.roles import PaddleCloudRoleMaker as PaddleCloudRoleMaker
from jaxfleet.cluster.roles import Role as Role
from jaxfleet.cluster.roles import RoleMakerBase as RoleMakerBase
from jaxfleet.cluster.roles import UserDefinedCollectiveRoleMaker as UserDefinedCollectiveRoleMaker
from jaxfleet.cluster.roles import UserDefinedRoleMaker as UserDefinedRoleMaker

"""Role makers, where fluid has them."""

from jaxfleet.fleet.roles import GeneralRoleMaker as GeneralRoleMaker
from jaxfleet.fleet.roles import K8SRoleMaker as K8SRoleMaker
from jaxfleet.fleet.roles import MPIRoleMaker as MPIRoleMaker
from jaxfleet.fleet.roles import MPISymetricRoleMaker as MPISymetricRoleMaker
from jaxfleet.fleet.roles import PaddleCloudRoleMaker as PaddleCloudRoleMaker
from jaxfleet.fleet.roles import Role as Role
from jaxfleet.fleet.roles import RoleMakerBase as RoleMakerBase
from jaxfleet.fleet.roles import UserDefinedCollectiveRoleMaker as UserDefinedCollectiveRoleMaker
from jaxfleet.fleet.roles import UserDefinedRoleMaker as UserDefinedRoleMaker

// Vulkan's C++ header, with the types of VK_EXT_layer_settings where it is older than that extension (1.3.272), as in
// Debian 12. llama.cpp names them; it uses them only where Vulkan's loader offers the extension.
#pragma once
#include_next <vulkan/vulkan.hpp>

#ifndef VK_EXT_LAYER_SETTINGS_EXTENSION_NAME
#include <vector>

namespace vk {

enum class LayerSettingTypeEXT { eBool32 = 0 };

struct LayerSettingEXT {
    const char * pLayerName;
    const char * pSettingName;
    LayerSettingTypeEXT type;
    uint32_t valueCount;
    const void * pValues;
};

struct LayerSettingsCreateInfoEXT {
    explicit LayerSettingsCreateInfoEXT(const std::vector<LayerSettingEXT> & settings)
        : settingCount(static_cast<uint32_t>(settings.size())), pSettings(settings.data()) {}

    StructureType sType = static_cast<StructureType>(1000496000);
    const void * pNext = nullptr;
    uint32_t settingCount;
    const LayerSettingEXT * pSettings;
};

} // namespace vk
#endif

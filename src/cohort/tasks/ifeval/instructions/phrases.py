"""A sentence about a quiet morning in every language that a generated prompt may ask for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Phrase:
    """The English name of a language, and a sentence in that language without commas and without a full stop."""

    language: str
    sentence: str


# by the language codes of langdetect
PHRASES = {
    "ar": Phrase("Arabic", "الصباح هادئ والمدينة القديمة تستيقظ ببطء قرب النهر"),
    "bg": Phrase("Bulgarian", "Сутринта беше тиха докато старият град бавно пробуждаше улиците край реката"),
    "bn": Phrase("Bengali", "সকালটা শান্ত এবং পুরনো শহর নদীর ধারে ধীরে ধীরে জেগে উঠছে"),
    "de": Phrase("German", "Der Morgen ist ruhig und die alte Stadt wacht langsam am Fluss auf"),
    "es": Phrase("Spanish", "La mañana es tranquila y el viejo pueblo despierta despacio junto al río"),
    "fa": Phrase("Persian", "صبح آرام است و شهر قدیمی آهسته کنار رودخانه بیدار می‌شود"),
    "fi": Phrase("Finnish", "Aamu on hiljainen ja vanha kaupunki herää hitaasti joen rannalla"),
    "fr": Phrase("French", "Le matin est calme et la vieille ville se réveille doucement près de la rivière"),
    "gu": Phrase("Gujarati", "સવાર શાંત છે અને જૂનું શહેર નદી કિનારે ધીમે ધીમે જાગી રહ્યું છે"),
    "he": Phrase("Hebrew", "הבוקר שקט והעיר העתיקה מתעוררת לאט ליד הנהר"),
    "hi": Phrase("Hindi", "सुबह शांत है और पुराना शहर नदी के किनारे धीरे धीरे जाग रहा है"),
    "it": Phrase("Italian", "La mattina è tranquilla e la vecchia città si sveglia lentamente vicino al fiume"),
    "ja": Phrase("Japanese", "朝は静かで古い町は川のそばでゆっくり目を覚ます"),
    "kn": Phrase("Kannada", "ಬೆಳಿಗ್ಗೆ ಶಾಂತವಾಗಿದೆ ಮತ್ತು ಹಳೆಯ ನಗರ ನದಿಯ ದಡದಲ್ಲಿ ನಿಧಾನವಾಗಿ ಎಚ್ಚರಗೊಳ್ಳುತ್ತಿದೆ"),
    "ko": Phrase("Korean", "아침은 조용하고 오래된 도시는 강가에서 천천히 깨어난다"),
    "ml": Phrase("Malayalam", "രാവിലെ ശാന്തമാണ് പഴയ നഗരം പുഴയുടെ തീരത്ത് പതുക്കെ ഉണരുന്നു"),
    "mr": Phrase("Marathi", "सकाळ शांत आहे आणि जुने शहर नदीच्या काठावर हळूहळू जागे होत आहे"),
    "ne": Phrase("Nepali", "बिहान शान्त छ र पुरानो सहर नदीको किनारमा बिस्तारै ब्युँझिरहेको छ"),
    "pa": Phrase("Punjabi", "ਸਵੇਰ ਸ਼ਾਂਤ ਹੈ ਅਤੇ ਪੁਰਾਣਾ ਸ਼ਹਿਰ ਨਦੀ ਦੇ ਕੰਢੇ ਹੌਲੀ ਹੌਲੀ ਜਾਗ ਰਿਹਾ ਹੈ"),
    "pl": Phrase("Polish", "Poranek jest spokojny i stare miasto powoli budzi się nad rzeką"),
    "pt": Phrase("Portuguese", "A manhã é tranquila e a velha cidade não tem pressa de acordar perto do rio"),
    "ru": Phrase("Russian", "Утро тихое пока старый город медленно просыпается возле реки"),
    "sw": Phrase("Swahili", "Asubuhi ni tulivu na mji wa kale unaamka polepole kando ya mto"),
    "ta": Phrase("Tamil", "காலை அமைதியாக உள்ளது மற்றும் பழைய நகரம் ஆற்றின் அருகே மெதுவாக விழிக்கிறது"),
    "te": Phrase("Telugu", "ఉదయం ప్రశాంతంగా ఉంది మరియు పాత నగరం నది ఒడ్డున నెమ్మదిగా మేల్కొంటోంది"),
    "th": Phrase("Thai", "เช้านี้เงียบสงบและเมืองเก่าค่อยๆ ตื่นขึ้นริมแม่น้ำ"),
    "uk": Phrase("Ukrainian", "Ранок тихий доки старе місто повільно прокидається біля річки"),
    "ur": Phrase("Urdu", "صبح خاموش ہے اور پرانا شہر دریا کے کنارے آہستہ آہستہ جاگ رہا ہے"),
    "vi": Phrase("Vietnamese", "Buổi sáng yên tĩnh và thành phố cổ thức dậy chậm rãi bên dòng sông"),
}
# Sentences without a full stop from which `gold` writes English texts.
ENGLISH = (
    "The day is bright and the road is long",
    "Old friends walk slowly through the green hills",
    "There is time for good talk and hot tea",
    "Nothing is lost when people help each other",
)
